"""Convert a dataset's raw dump to a question file, with a record of its sources."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prompt_r1.data.datasets import Dataset, Draft, LeftOut
from prompt_r1.data.fields import BadRow, Fields, id_from_text, kind_of, question_key
from prompt_r1.data.files import write_questions
from prompt_r1.data.raw import raw_rows
from prompt_r1.errors import UsageError
from prompt_r1.metrics.text import normalise
from prompt_r1.types import Question


@dataclass(frozen=True)
class Conversion:
    """The questions of a dump, and how many of its rows were left out."""

    questions: list[Question]
    rows: int
    left_out: Counter[str]  # reason → rows


def convert(
    prefix: str,
    dataset: Dataset,
    paths: Sequence[Path],
    *,
    where: Mapping[str, str],
    aliases: Mapping[str, Sequence[str]],
    one_gold: bool,
) -> Conversion:
    """The questions of raw dumps in the order of the files, without repeats.

    The ids begin with `prefix`. `where` selects rows whose fields have the given values, `aliases` adds
    gold answers by the row's `answer_id`, and `one_gold` keeps only the first gold answer. Raises UsageError
    with the file, the row and the reason.
    """
    questions: dict[str, Question] = {}  # by question_key
    ids: set[str] = set()
    left_out: Counter[str] = Counter()
    rows = 0
    for path in paths:
        for number, row in raw_rows(path, [*dataset.columns, *where]):
            rows += 1
            try:
                draft = _draft(dataset, row, where, aliases)
            except LeftOut as reason:
                left_out[str(reason)] += 1
                continue
            except BadRow as reason:
                raise UsageError(f"{path}, row {number}: {reason}") from None
            answers = draft.answers[:1] if one_gold else draft.answers
            key = question_key(draft.text)
            if key in questions:
                same = set(answers) == set(questions[key].answers)
                left_out["asked before" if same else "asked before, with other golds"] += 1
                continue
            question_id = f"{prefix}-{draft.id}"
            if not draft.id or question_id in ids:
                question_id = id_from_text(draft.text)
            ids.add(question_id)
            questions[key] = Question(question_id, dataset.name, draft.text, answers, kind_of(dataset.name))
    return Conversion(list(questions.values()), rows, left_out)


def _draft(
    dataset: Dataset, row: Fields, where: Mapping[str, str], aliases: Mapping[str, Sequence[str]]
) -> Draft:
    """The question of a row. Raises LeftOut or BadRow if there is none."""
    for field, value in where.items():
        if field not in row:
            raise BadRow(f"the field {field} is missing")
        if str(row[field]) != value:
            raise LeftOut(f"{field} is not {value}")
    draft = dataset.convert(row)
    more = aliases.get(str(row.get("answer_id")), ())
    answers = tuple(dict.fromkeys([*draft.answers, *more]))  # without repeats
    if not any(normalise(answer) for answer in answers):
        raise LeftOut("every gold is empty after normalisation")
    return replace(draft, answers=answers)


def read_aliases(path: Path) -> dict[str, list[str]]:
    """Read 2WikiMultihopQA's id_aliases.json: entity → its other names."""
    aliases = {}
    for number, row in raw_rows(path, ()):
        other_names, demonyms = row.get("aliases"), row.get("demonyms")
        if "Q_id" not in row or not isinstance(other_names, list) or not isinstance(demonyms, list):
            raise UsageError(f"{path}, row {number}: the fields Q_id, aliases and demonyms are required")
        names = [str(name) for name in [*other_names, *demonyms]]
        aliases[str(row["Q_id"])] = [name for name in names if name.strip()]
    return aliases


def write_conversion(out: Path, conversion: Conversion, paths: Sequence[Path]) -> str:
    """Write the questions to `out` and their origin to `out`.source.json. Returns a report to print.

    The origin is the SHA-256 of the sources, and the number of rows that were left out for each reason.
    """
    write_questions(out, conversion.questions)
    dataset = conversion.questions[0].dataset
    sources = [{"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths]
    record = {
        "dataset": dataset,
        "sources": sources,
        "rows": conversion.rows,
        "questions": len(conversion.questions),
        "left_out": dict(conversion.left_out.most_common()),
        "sha256": sha256(out),
    }
    record_path = out.with_name(out.name + ".source.json")
    record_path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    lines = [f"{out}: {len(conversion.questions):,} questions of {dataset} from {conversion.rows:,} rows"]
    lines += [f"  left out: {count:,} ({reason})" for reason, count in conversion.left_out.most_common()]
    lines.append(f"  sources and their sha256: {record_path.name}")
    return "\n".join(lines)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, without loading it into memory as a whole."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
