"""Convert a dataset's raw dump to a question file."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_r1.data.datasets import DATASETS, LeftOut
from prompt_r1.data.files import id_from_text, kind_of, question_key, write_questions
from prompt_r1.data.rows import BadRow, read_rows
from prompt_r1.errors import UsageError
from prompt_r1.metrics.em_f1 import normalise
from prompt_r1.types import Question


@dataclass(frozen=True)
class Conversion:
    """The questions of a dump, and how many of its rows were left out."""

    questions: list[Question]
    rows: int
    left_out: Counter[str]  # reason → rows


def convert(name: str, paths: Sequence[Path], *, one_gold: bool = False) -> Conversion:
    """The questions of raw dumps of a dataset in the order of the files, without repeats.

    `one_gold` keeps only the first gold answer. Raises UsageError with the file, the row and the reason, also
    if no question is left.
    """
    dataset = DATASETS[name]
    questions: dict[str, Question] = {}  # by question_key
    ids: set[str] = set()
    left_out: Counter[str] = Counter()
    rows = 0
    for path in paths:
        for number, row in read_rows(path, dataset.columns):
            rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                draft = dataset.convert(row)
            except LeftOut as reason:
                left_out[str(reason)] += 1
                continue
            except BadRow as reason:
                raise UsageError(f"{path}, row {number}: {reason}") from None
            answers = draft.answers[:1] if one_gold else draft.answers
            key = question_key(draft.text)
            if not any(map(normalise, draft.answers)):
                left_out["every gold is empty after normalisation"] += 1
            elif key in questions:
                same = set(answers) == set(questions[key].answers)
                left_out["asked before" if same else "asked before, with other golds"] += 1
            else:
                own_id = f"{name}-{draft.id}"
                new_id = own_id if draft.id and own_id not in ids else id_from_text(draft.text)
                ids.add(new_id)
                questions[key] = Question(new_id, dataset.name, draft.text, answers, kind_of(dataset.name))
    if not questions:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "empty"
        raise UsageError(f"{paths[0]}: none of the {rows:,} rows is left ({reasons})")
    return Conversion(list(questions.values()), rows, left_out)


def write_conversion(out: Path, conversion: Conversion, paths: Sequence[Path]) -> str:
    """Write the questions to `out` and their origin to `out`.source.json. Returns a report to print.

    The origin is the SHA-256 of the sources, and the number of rows that were left out for each reason.
    """
    write_questions(out, conversion.questions)
    dataset, count = conversion.questions[0].dataset, len(conversion.questions)
    left_out = dict(conversion.left_out.most_common())
    record = {
        "dataset": dataset,
        "sources": [
            {"file": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths
        ],
        "rows": conversion.rows,
        "questions": count,
        "left_out": left_out,
        "sha256": _sha256(out),
    }
    record_path = out.with_name(out.name + ".source.json")
    record_path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    lines = [f"{out}: {count:,} questions of {dataset} from {conversion.rows:,} rows"]
    lines += [f"  left out: {rows:,} ({reason})" for reason, rows in left_out.items()]
    return "\n".join([*lines, f"  sources and their sha256: {record_path.name}"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
