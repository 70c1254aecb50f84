"""Draw the training mix: equally many questions of each dataset."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prompt_r1.data.datasets import PAPER_MIX
from prompt_r1.data.files import id_from_text, question_key
from prompt_r1.types import Question


@dataclass(frozen=True)
class Mix:
    """Shuffled parts that share no question, and how many questions each dataset had and contributed."""

    parts: list[list[Question]]
    available: dict[str, int]  # dataset → distinct questions that may be drawn
    drawn: dict[str, list[int]]  # dataset → its number of questions in each part


def mix(
    questions: Sequence[Question], sizes: Sequence[int], *, seed: int, exclude: Sequence[Question] = ()
) -> Mix:
    """Draw `sizes[i]` random questions of each dataset for part i.

    The last part is filled first when a dataset is too small. Questions that differ only in case or white
    space count as one, and questions in `exclude` (the test files) are never drawn.
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
    parts: list[list[Question]] = [[] for _ in sizes]
    drawn: dict[str, list[int]] = {}
    for dataset, candidates in sorted(by_dataset.items()):
        random.Random(f"mix {seed} {dataset}").shuffle(candidates)
        start = 0
        drawn[dataset] = [0] * len(sizes)
        # The last part is the small validation set, which must not end up empty.
        for index in reversed(range(len(sizes))):
            chosen = candidates[start : start + sizes[index]]
            parts[index] += chosen
            drawn[dataset][index] = len(chosen)
            start += len(chosen)
    for index, part in enumerate(parts):
        random.Random(f"mix {seed} {index}").shuffle(part)
    return Mix(parts, {dataset: len(by_dataset[dataset]) for dataset in drawn}, drawn)


def mix_report(result: Mix, sizes: Sequence[int]) -> str:
    """One line per dataset with the number of questions drawn, and one with the datasets that are missing."""
    lines = []
    for dataset, counts in result.drawn.items():
        line = f"  {dataset}: {' + '.join(f'{count:,}' for count in counts)} of {result.available[dataset]:,}"
        short = sum(sizes) - sum(counts)
        lines.append(f"{line} ({short:,} fewer than requested)" if short else line)
    missing = [dataset for dataset in PAPER_MIX if dataset not in result.drawn]
    if missing:
        lines.append(f"  datasets of the paper's mix that are missing: {', '.join(missing)}")
    return "\n".join(lines)
