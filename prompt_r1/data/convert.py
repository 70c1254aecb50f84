"""Convert raw dumps of the datasets to questions, and draw the training mix from them."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from prompt_r1.data.datasets import CONVERTED, LeftOut
from prompt_r1.data.files import BadRow, fields_of, id_from_text, kind_of, question_key, read_rows
from prompt_r1.errors import UsageError
from prompt_r1.metrics.em_f1 import normalise
from prompt_r1.types import Question


def convert(name: str, sources: Sequence[str]) -> tuple[list[Question], Counter[str]]:
    """The questions of raw dumps of a dataset without repeats, and how many rows were left out and why.

    Raises UsageError with the file, the row and the reason, also if no question is left.
    """
    dataset = CONVERTED[name]
    questions: dict[str, Question] = {}  # by question_key
    left_out: Counter[str] = Counter()
    for source in sources:
        for number, row in read_rows(source):
            try:
                text, golds = dataset.convert(fields_of(row))
            except LeftOut as reason:
                left_out[str(reason)] += 1
                continue
            except BadRow as reason:
                raise UsageError(f"{source}, row {number}: {reason}") from None
            key = question_key(text)
            if not any(map(normalise, golds)):
                left_out["every gold is empty after normalisation"] += 1
            elif key in questions:
                left_out["asked before"] += 1
            else:
                kind = kind_of(dataset.name)
                questions[key] = Question(id_from_text(text), dataset.name, text, golds, kind)
    if not questions:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "no rows"
        raise UsageError(f"{sources[0]}: no question is left ({reasons})")
    return list(questions.values()), left_out


def mix(
    questions: Sequence[Question], per_dataset: int, *, seed: int, exclude: Sequence[Question] = ()
) -> list[Question]:
    """Draw `per_dataset` random questions of each dataset, in random order.

    Questions that differ only in case or white space count as one, and questions in `exclude` (the test
    files) are never drawn.
    """
    seen = {question_key(question.text) for question in exclude}
    ids: set[str] = set()
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        key = question_key(question.text)
        if key in seen:
            continue
        if question.id in ids:  # two datasets may use the same ids
            question = replace(question, id=id_from_text(question.text))
        seen.add(key)
        ids.add(question.id)
        by_dataset.setdefault(question.dataset, []).append(question)
    drawn: list[Question] = []
    for dataset, candidates in sorted(by_dataset.items()):
        random.Random(f"mix {seed} {dataset}").shuffle(candidates)
        drawn += candidates[:per_dataset]
    random.Random(f"mix {seed} 0").shuffle(drawn)
    return drawn
