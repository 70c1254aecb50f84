"""The training mix: as many questions of each dataset, seeded (the paper: 5,120 of each of eight)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prompt_r1.data.fields import digest, question_key
from prompt_r1.types import Question

TRAINED = (
    "2WikiMultihopQA",
    "HotpotQA",
    "GSM8K",
    "DAPO-Math",
    "MuSiQue",
    "PopQA",
    "BookSum",
    "WritingPrompts",
)


@dataclass(frozen=True)
class Mix:
    """Shuffled parts without a common question, and how many each dataset had and gave."""

    parts: list[list[Question]]
    available: dict[str, int]  # dataset → different questions that may be drawn
    drawn: dict[str, list[int]]  # dataset → how many went to each part


def mix(
    questions: Sequence[Question], sizes: Sequence[int], *, seed: int, exclude: Sequence[Question] = ()
) -> Mix:
    """`sizes[i]` questions of each dataset for part i, at random; a small dataset fills the last part first.

    A question is drawn once, whatever its case and blanks, and never if it is in `exclude` (the test files).
    """
    taken = {question_key(question.text) for question in exclude}
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        key = question_key(question.text)
        if key not in taken:
            taken.add(key)
            by_dataset.setdefault(question.dataset, []).append(question)
    parts: list[list[Question]] = [[] for _ in sizes]
    drawn: dict[str, list[int]] = {}
    for dataset, its in sorted(by_dataset.items()):
        random.Random(f"mix {seed} {dataset}").shuffle(its)
        start, counts = 0, [0] * len(sizes)
        # Validation is small and must not come out empty, so the last part is filled first.
        for place in reversed(range(len(sizes))):
            chosen = its[start : start + sizes[place]]
            parts[place] += chosen
            counts[place] = len(chosen)
            start += len(chosen)
        drawn[dataset] = counts
    for place, part in enumerate(parts):
        random.Random(f"mix {seed} {place}").shuffle(part)
    available = {dataset: len(its) for dataset, its in sorted(by_dataset.items())}
    return Mix([_with_own_ids(part) for part in parts], available, drawn)


def report(result: Mix, sizes: Sequence[int], wanted: Sequence[str] = TRAINED) -> str:
    """A line a dataset: what it gave, and what is missing."""
    lines = []
    for dataset, counts in result.drawn.items():
        line = f"  {dataset}: {' + '.join(f'{count:,}' for count in counts)} of {result.available[dataset]:,}"
        short = sum(sizes) - sum(counts)
        lines.append(line + (f" ({short:,} fewer than asked for)" if short else ""))
    missing = [dataset for dataset in wanted if dataset not in result.drawn]
    if missing:
        lines.append(f"  not in the mix, but trained on in the paper: {', '.join(missing)}")
    return "\n".join(lines)


def _with_own_ids(questions: list[Question]) -> list[Question]:
    """Two datasets may number their questions alike."""
    ids: set[str] = set()
    result = []
    for question in questions:
        if question.id in ids:
            question = replace(question, id=digest(question.text))
        ids.add(question.id)
        result.append(question)
    return result
