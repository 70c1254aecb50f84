"""The interface of all compared methods."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.spending import Spending
from prompt_r1.types import Question


@dataclass
class Ledger:
    """What a preparation has spent."""

    task: Spending = field(default_factory=Spending)  # with the environment that is evaluated
    optimizer: Spending = field(default_factory=Spending)  # with the model that writes prompts

    @property
    def row(self) -> dict[str, float]:
        """Its fields in results.json."""
        total = self.task + self.optimizer
        calls = {"task_calls": self.task.calls, "optimizer_calls": self.optimizer.calls}
        return {**calls, "tokens_in": total.tokens_in, "tokens_out": total.tokens_out, "usd": total.usd}


@dataclass
class Method:
    """A method of the tables."""

    ledger: Ledger = field(init=False, default_factory=Ledger)  # what `prepare` spent

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Optimise a prompt or fine-tune an agent; most methods do nothing. Earlier results are reused."""

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        """Answer a question. Several calls may run concurrently, after `prepare`.

        `sample` numbers the repeats of a question; `seed` is that of an agent's sampling.
        """
        raise NotImplementedError
