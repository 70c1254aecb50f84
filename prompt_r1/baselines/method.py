"""What every compared method is: it prepares once, then answers question after question."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from prompt_r1.environments.metered import Reply
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError
from prompt_r1.types import Message, Question, Trajectory


@dataclass(frozen=True)
class Attempt:
    """One evaluation answer and what it cost, whether it was paid now or the journal had it."""

    answer: str | None  # None: there is none, or the environment failed
    raw: str  # all that was said: the reply, the replies, or the dialogue
    calls: int = 0  # of the environment
    turns: int = 1  # of the agent; 1 for a method without one
    stop: str = "answered"  # how a game ended (types.Stop); "env_error" for any method
    error: str | None = None  # why the environment failed: the answer is not scored
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0
    format: float | None = None  # 1: in the form that was asked for, 0: not; None: no form was asked for
    trajectory: Trajectory | None = None  # of a method that plays games


@dataclass
class Ledger:
    """What preparing a method cost."""

    task_calls: int = 0  # of the environment that is evaluated
    optimizer_calls: int = 0  # of the model that writes prompts
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0

    @property
    def calls(self) -> int:
        return self.task_calls + self.optimizer_calls

    def add(self, reply: Reply, *, optimizer: bool = False) -> None:
        """Count one call of the environment, or of the model that writes prompts."""
        self.task_calls += not optimizer
        self.optimizer_calls += optimizer
        self.tokens_in += reply.tokens_in
        self.tokens_out += reply.tokens_out
        self.usd += reply.usd

    def add_attempt(self, attempt: Attempt) -> None:
        """Count all calls of an answered question."""
        self.task_calls += attempt.calls
        self.tokens_in += attempt.tokens_in
        self.tokens_out += attempt.tokens_out
        self.usd += attempt.usd


class Method(Protocol):
    """A row of the tables. Answers may be asked for side by side, after `prepare` has ended."""

    name: str
    ledger: Ledger

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Optimise a prompt, fine-tune, …; nothing for most. What was prepared before is found again."""

    async def answer(self, question: Question, *, sample: int, seed: str) -> Attempt:
        """One answer. `sample` tells apart the repeats of a question, `seed` is the agent's."""


@dataclass
class Meter:
    """An environment for one attempt: passes on what is asked, and counts."""

    environment: Pool
    spent: Ledger = field(default_factory=Ledger)

    @property
    def name(self) -> str:
        return self.environment.name

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        try:
            reply = await self.environment.call(messages, sample=sample, session=session)
        except EnvError:
            self.spent.task_calls += 1
            raise
        self.spent.add(reply)
        return reply.text

    async def close(self) -> None:
        await self.environment.close()

    def billed(self, attempt: Attempt) -> Attempt:
        """The attempt with the costs that were counted here."""
        spent = self.spent
        return replace(attempt, calls=spent.task_calls, tokens_in=spent.tokens_in,
                       tokens_out=spent.tokens_out, usd=spent.usd)  # fmt: skip
