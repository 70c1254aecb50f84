"""The interface of all compared methods: prepare once, then answer one question after another."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from prompt_r1.environments.metered import Reply
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.types import Message, Question


@dataclass
class Ledger:
    """Calls, tokens and dollars that were spent."""

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
        if optimizer:
            self.optimizer_calls += 1
        else:
            self.task_calls += 1
        self.tokens_in += reply.tokens_in
        self.tokens_out += reply.tokens_out
        self.usd += reply.usd

    def add_ledger(self, other: "Ledger") -> None:
        """Count all that another ledger counted."""
        self.task_calls += other.task_calls
        self.optimizer_calls += other.optimizer_calls
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out
        self.usd += other.usd

    def add_prediction(self, prediction: Prediction) -> None:
        """Count all calls of an answered question."""
        self.task_calls += prediction.calls
        self.tokens_in += prediction.tokens_in
        self.tokens_out += prediction.tokens_out
        self.usd += prediction.usd

    def bill(self, prediction: Prediction) -> Prediction:
        """The prediction with the costs of this ledger."""
        return replace(
            prediction,
            calls=self.task_calls,
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            usd=self.usd,
        )


class Method(Protocol):
    """A method of the tables."""

    name: str
    ledger: Ledger  # what `prepare` spent

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Optimise a prompt, fine-tune, …; most methods do nothing. Earlier results are reused."""

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        """Answer a question. Several calls may run concurrently, after `prepare`.

        `sample` numbers the repeats of a question; `seed` is that of an agent's sampling.
        """


@dataclass
class Meter:
    """An environment that counts what one answer costs."""

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
