"""The compared methods behind one interface: `make_method(name, context)` returns a `Method`."""

from prompt_r1.baselines.make import (
    AgentCache,
    MethodContext,
    make_method,
    preparation_questions,
    request_fields,
)
from prompt_r1.baselines.method import Ledger, Method

__all__ = [
    "AgentCache",
    "Ledger",
    "Method",
    "MethodContext",
    "make_method",
    "preparation_questions",
    "request_fields",
]
