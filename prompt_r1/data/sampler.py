"""The order in which training sees the questions."""

import random
from collections.abc import Mapping, Sequence

from prompt_r1.errors import UsageError
from prompt_r1.types import Question


class QuestionSampler:
    """Question after question in shuffled epochs: the same order for the same seed, and resumable."""

    def __init__(self, questions: Sequence[Question], *, seed: int) -> None:
        assert questions, "no questions to sample from"
        self.questions = questions
        self.seed = seed
        self._start_epoch(0)

    def take(self, count: int) -> list[Question]:
        """The next `count` questions, over the end of the epoch if need be."""
        taken: list[Question] = []
        while len(taken) < count:
            if self.position == len(self.questions):
                self._start_epoch(self.epoch + 1)
            chosen = self.order[self.position : self.position + count - len(taken)]
            taken += [self.questions[index] for index in chosen]
            self.position += len(chosen)
        return taken

    def state(self) -> dict[str, int]:
        """Where the sampler is; the order itself follows from the seed."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken. Raises UsageError when the data has become shorter than that."""
        if not 0 <= state["position"] <= len(self.questions):
            raise UsageError(f"the checkpoint stopped at question {state['position']}, but the data has only "
                             f"{len(self.questions)}: give the data that the run began with")  # fmt: skip
        self._start_epoch(state["epoch"])
        self.position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.position = 0
        self.order = list(range(len(self.questions)))
        random.Random(f"questions {self.seed} {epoch}").shuffle(self.order)
