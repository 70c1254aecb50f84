"""The order of training questions, and samples of questions."""

import hashlib
import json
import random
from collections.abc import Sequence

from prompt_r1.types import Question


def questions_of_step(questions: Sequence[Question], step: int, *, count: int, seed: int) -> list[Question]:
    """The `count` questions of a training step, from 1: the next ones of shuffled epochs.

    They depend on the arguments alone, so a resumed run continues where it stopped.
    """
    start, size = (step - 1) * count, len(questions)
    order: list[Question] = []  # of the epochs from which the step takes questions
    for epoch in range(start // size, (start + count - 1) // size + 1):
        shuffled = list(questions)
        random.Random(f"questions {seed} {epoch}").shuffle(shuffled)
        order += shuffled
    return order[start % size :][:count]


def digest_of(questions: Sequence[Question]) -> str:
    """Identifies questions, their answers and their order."""
    digest = hashlib.sha256()
    for question in questions:
        row = {name: value for name, value in vars(question).items() if value or name != "extra"}
        digest.update(json.dumps(row, default=str).encode() + b"\n")
    return digest.hexdigest()[:32]


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
