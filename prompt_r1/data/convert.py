"""A dataset's raw dump → a file of questions, with a record of where they come from."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_r1.data.fields import BadRow, digest, kind_of, question_key
from prompt_r1.data.files import write_questions
from prompt_r1.data.raw import Fields, raw_rows
from prompt_r1.data.sources import Draft, LeftOut, Source
from prompt_r1.errors import UsageError
from prompt_r1.metrics.text import normalise
from prompt_r1.types import Question


@dataclass(frozen=True)
class Conversion:
    """What became of the rows of a dump."""

    questions: list[Question]
    rows: int
    left_out: Counter[str]  # reason → rows


def convert(
    name: str,
    source: Source,
    paths: Sequence[Path],
    *,
    where: Mapping[str, str] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    one_gold: bool = False,
) -> Conversion:
    """The questions of raw dumps, each question once, in the order of the files.

    `where`: only rows whose fields have these values; `aliases`: golds to add by the row's `answer_id`;
    `one_gold`: the first gold only. `name` begins the ids. Raises UsageError naming file, row and reason.
    """
    questions: dict[str, Question] = {}
    ids: set[str] = set()
    left_out: Counter[str] = Counter()
    rows = 0
    for path in paths:
        for number, row in raw_rows(path, (*source.columns, *(where or {}))):
            rows += 1
            try:
                draft = _draft(source, row, where or {}, aliases or {})
            except LeftOut as reason:
                left_out[str(reason)] += 1
                continue
            except BadRow as reason:
                raise UsageError(f"{path}, row {number}: {reason}") from None
            golds = draft.answers[:1] if one_gold else draft.answers
            key = question_key(draft.text)
            if key in questions:
                same = set(golds) == set(questions[key].answers)
                left_out["asked before" if same else "asked before, with other golds"] += 1
                continue
            own = f"{name}-{draft.id}" if draft.id else digest(draft.text)
            own = digest(draft.text) if own in ids else own
            ids.add(own)
            questions[key] = Question(own, source.dataset, draft.text, golds, kind_of(source.dataset))
    return Conversion(list(questions.values()), rows, left_out)


def _draft(
    source: Source, row: Fields, where: Mapping[str, str], aliases: Mapping[str, Sequence[str]]
) -> Draft:
    for field, wanted in where.items():
        if field not in row:
            raise BadRow(f"the field {field} is missing")
        if str(row[field]) != wanted:
            raise LeftOut(f"{field} is not {wanted}")
    draft = source.convert(row)
    more = aliases.get(str(row.get("answer_id")), ())
    draft = Draft(draft.text, tuple(dict.fromkeys([*draft.answers, *more])), draft.id)
    if not any(normalise(gold) for gold in draft.answers):
        raise LeftOut("every gold is empty after normalisation")
    return draft


def read_aliases(path: Path) -> dict[str, list[str]]:
    """2WikiMultihopQA's id_aliases.json: entity → its other names."""
    aliases = {}
    for number, row in raw_rows(path, ()):
        other_names, demonyms = row.get("aliases"), row.get("demonyms")
        if "Q_id" not in row or not isinstance(other_names, list) or not isinstance(demonyms, list):
            raise UsageError(f"{path}, row {number}: Q_id, aliases and demonyms are wanted")
        names = [str(name) for name in [*other_names, *demonyms]]
        aliases[str(row["Q_id"])] = [name for name in names if name.strip()]
    return aliases


def write_conversion(out: Path, conversion: Conversion, paths: Sequence[Path]) -> str:
    """The questions, and beside them OUT.source.json: the dumps' sha256, counts, what was left out and why.

    Returns the report to print.
    """
    write_questions(out, conversion.questions)
    dataset = conversion.questions[0].dataset
    record = {
        "dataset": dataset,
        "sources": [
            {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths
        ],
        "rows": conversion.rows,
        "questions": len(conversion.questions),
        "left_out": dict(conversion.left_out.most_common()),
        "sha256": sha256(out),
    }
    out.with_name(out.name + ".source.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    lines = [f"{out}: {len(conversion.questions):,} questions of {dataset} from {conversion.rows:,} rows"]
    lines += [f"  left out: {count:,} ({reason})" for reason, count in conversion.left_out.most_common()]
    return "\n".join([*lines, f"  sources and their sha256: {out.name}.source.json"])


def sha256(path: Path) -> str:
    """Of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
