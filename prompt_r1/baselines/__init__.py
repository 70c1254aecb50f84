"""The methods of the paper's tables behind one protocol: `make_method(name, …)` → `Method`."""

from prompt_r1.baselines.make import AgentCache, make_method, preparation_questions
from prompt_r1.baselines.method import Attempt, Ledger, Method

__all__ = ["AgentCache", "Attempt", "Ledger", "Method", "make_method", "preparation_questions"]
