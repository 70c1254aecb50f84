"""The interface of all compared methods."""

from collections.abc import Sequence

from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.types import Question


class Method:
    """A method of the tables."""

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Optimise a prompt or fine-tune an agent; most methods do nothing. Earlier results are reused."""

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        """Answer a question. Several calls may run concurrently, after `prepare`.

        `sample` numbers the repeats of a question; `seed` is that of an agent's sampling.
        """
        raise NotImplementedError
