"""Which questions a training step plays, and stratified samples."""

import hashlib
import json
import random
from collections.abc import Sequence

from prompt_r1.types import Question


def questions_of_step(questions: Sequence[Question], step: int, *, count: int, seed: int) -> list[Question]:
    """The `count` questions of a training step, whose number begins at 1.

    Every epoch shuffles all questions, and each step takes the next `count` of them. The result depends on
    the arguments alone, so a resumed run continues where it stopped.
    """
    size = len(questions)
    first = (step - 1) * count  # the place of the step's first question, counted over all epochs
    last = first + count - 1
    order: list[Question] = []  # the shuffled epochs that the step takes questions from
    for epoch in range(first // size, last // size + 1):
        shuffled = list(questions)
        random.Random(f"questions {seed} {epoch}").shuffle(shuffled)
        order += shuffled
    start = first % size
    return order[start : start + count]


def digest_of(questions: Sequence[Question]) -> str:
    """A digest of questions, their answers and their order, which is the same in every process.

    `extra` may hold values that JSON does not have, such as dates and objects. They count by their type
    alone, because their text may have an address in memory. Keys that JSON does not have do not count.
    """
    digest = hashlib.sha256()
    for question in questions:
        text = json.dumps(vars(question), default=lambda value: type(value).__name__, skipkeys=True)
        digest.update(text.encode())
    return digest.hexdigest()[:32]


def stratified(questions: Sequence[Question]) -> list[Question]:
    """Order questions so that the first n are a stratified random sample, for every n.

    Among the first n, each dataset has its share, to within one question. The order depends only on the
    questions, not on the seed of a run, so all runs are validated on the same questions.
    """
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        by_dataset.setdefault(question.dataset, []).append(question)
    # The questions of each dataset are spread evenly over (0, 1), in random order. Ties are broken at random.
    placed: list[tuple[tuple[float, float], Question]] = []
    for dataset, group in by_dataset.items():
        rng = random.Random(f"sample {dataset}")
        for number, question in enumerate(rng.sample(group, len(group))):
            place = (number + 0.5) / len(group)
            placed.append(((place, rng.random()), question))
    placed.sort(key=lambda pair: pair[0])
    return [question for _, question in placed]
