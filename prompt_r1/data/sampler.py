"""The order in which training sees the questions, and samples of questions."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property

from prompt_r1.errors import UsageError
from prompt_r1.types import Question


class QuestionSampler:
    """Yields questions in shuffled epochs. The order depends only on the seed, and can be resumed."""

    def __init__(self, questions: Sequence[Question], *, seed: int) -> None:
        assert questions, "no questions to sample from"
        self.questions = questions
        self.seed = seed
        self._start_epoch(0)

    @cached_property
    def digest(self) -> str:
        """Identifies the questions, their answers and their order."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(json.dumps(asdict(question)).encode() + b"\n")
        return digest.hexdigest()[:32]

    def take(self, count: int) -> list[Question]:
        """The next `count` questions, continuing into the next epoch if necessary."""
        taken: list[Question] = []
        while len(taken) < count:
            if self.position == len(self.questions):
                self._start_epoch(self.epoch + 1)
            chosen = self.order[self.position : self.position + count - len(taken)]
            taken += [self.questions[index] for index in chosen]
            self.position += len(chosen)
        return taken

    def state(self) -> dict[str, int]:
        """The position in the data. The order of the epoch follows from the seed."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from `state`. Raises UsageError if the data is now shorter than its position."""
        if not 0 <= state["position"] <= len(self.questions):
            raise UsageError(
                f"the checkpoint stopped at question {state['position']}, but the data has only "
                f"{len(self.questions)} questions: give the same --data as when the run began"
            )
        self._start_epoch(state["epoch"])
        self.position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.position = 0
        self.order = list(range(len(self.questions)))
        random.Random(f"questions {self.seed} {epoch}").shuffle(self.order)


def stratified(questions: Sequence[Question]) -> list[Question]:
    """The questions in an order of which every beginning is a stratified random sample.

    In the first n, each dataset has its share, to within one question. The order depends only on the
    questions, not on the seed of a run: runs are validated on the same questions.
    """
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        by_dataset.setdefault(question.dataset, []).append(question)
    places: list[tuple[float, float, Question]] = []
    for dataset, group in by_dataset.items():
        rng = random.Random(f"sample {dataset}")
        for number, question in enumerate(rng.sample(group, len(group))):
            places.append(((number + 0.5) / len(group), rng.random(), question))
    places.sort(key=lambda place: place[:2])
    return [question for _, _, question in places]
