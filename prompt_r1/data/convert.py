"""Convert raw dumps of the datasets to questions, and draw the training mix from them."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.datasets import DATASETS, PAPER_MIX, LeftOut
from prompt_r1.data.files import BadRow, fields_of, id_from_text, kind_of, question_key, read_rows
from prompt_r1.errors import UsageError
from prompt_r1.metrics.em_f1 import normalise
from prompt_r1.types import Question


def convert(name: str, paths: Sequence[Path]) -> tuple[list[Question], Counter[str]]:
    """The questions of raw dumps of a dataset without repeats, and how many rows were left out and why.

    Raises UsageError with the file, the row and the reason, also if no question is left.
    """
    dataset = DATASETS[name]
    questions: dict[str, Question] = {}  # by question_key
    ids: set[str] = set()
    left_out: Counter[str] = Counter()
    for path in paths:
        for number, row in read_rows(path):
            try:
                draft = dataset.convert(fields_of(row))
            except LeftOut as reason:
                left_out[str(reason)] += 1
                continue
            except BadRow as reason:
                raise UsageError(f"{path}, row {number}: {reason}") from None
            key = question_key(draft.text)
            if not any(map(normalise, draft.answers)):
                left_out["every gold is empty after normalisation"] += 1
            elif key in questions:
                left_out["asked before"] += 1
            else:
                own_id = f"{name}-{draft.id}"
                new_id = own_id if draft.id and own_id not in ids else id_from_text(draft.text)
                ids.add(new_id)
                kind = kind_of(dataset.name)
                questions[key] = Question(new_id, dataset.name, draft.text, draft.answers, kind)
    if not questions:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "no rows"
        raise UsageError(f"{paths[0]}: no question is left ({reasons})")
    return list(questions.values()), left_out


def mix(
    questions: Sequence[Question], sizes: Sequence[int], *, seed: int, exclude: Sequence[Question] = ()
) -> list[list[Question]]:
    """Draw `sizes[i]` random questions of each dataset for part i; the parts share no question.

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
    for dataset, candidates in sorted(by_dataset.items()):
        random.Random(f"mix {seed} {dataset}").shuffle(candidates)
        # The last part is the small validation set, which must not end up empty.
        for part, size in zip(reversed(parts), reversed(sizes), strict=True):
            part += candidates[:size]
            candidates = candidates[size:]
    for index, part in enumerate(parts):
        random.Random(f"mix {seed} {index}").shuffle(part)
    return parts


def mix_report(parts: Sequence[Sequence[Question]], wanted: int) -> str:
    """One line per dataset with the number of questions drawn, and one with the datasets that are missing."""
    drawn = [Counter(question.dataset for question in part) for part in parts]
    lines = []
    for dataset in sorted(set().union(*drawn)):
        counts = [part[dataset] for part in drawn]
        missing = f" ({wanted - sum(counts):,} fewer than requested)" if sum(counts) < wanted else ""
        lines.append(f"  {dataset}: {' + '.join(f'{count:,}' for count in counts)}{missing}")
    absent = [dataset for dataset in PAPER_MIX if not any(dataset in part for part in drawn)]
    if absent:
        lines.append(f"  datasets of the paper's mix that are missing: {', '.join(absent)}")
    return "\n".join(lines)
