"""Find bad rows, repeats, leaks and unmatchable golds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np

from prompt_r1.data.files import UNNAMED, question_key, read_questions, without_dapo_wrapper
from prompt_r1.data.rows import BadRow
from prompt_r1.metrics.em_f1 import normalise
from prompt_r1.types import Question


@dataclass(frozen=True)
class Finding:
    """A problem: its rows, from 1, and a description."""

    rows: tuple[int, ...]
    what: str


@dataclass
class FileAudit:
    """The questions of a file by row number, and the findings."""

    path: Path
    questions: dict[int, Question] = field(default_factory=dict)
    bad: list[Finding] = field(default_factory=list)
    duplicates: list[Finding] = field(default_factory=list)  # one per repeated question
    empty_golds: list[Finding] = field(default_factory=list)


def audit_file(path: Path) -> FileAudit:
    """Audit one file. Raises UsageError if the file as a whole cannot be read."""
    audit = FileAudit(path)
    rows_by_key: dict[str, list[int]] = {}
    for row, question in read_questions(path):
        if isinstance(question, BadRow):
            audit.bad.append(Finding((row,), str(question)))
            continue
        audit.questions[row] = question
        rows_by_key.setdefault(question_key(question.text), []).append(row)
        empty = [gold for gold in question.answers if not normalise(gold)]
        if empty:
            only = " (no other gold)" if len(empty) == len(question.answers) else ""
            audit.empty_golds.append(Finding((row,), f"{', '.join(map(repr, empty))}{only}"))
    for rows in rows_by_key.values():
        if len(rows) > 1:
            what = _excerpt(audit.questions[rows[0]].text)
            if len({audit.questions[row].answers for row in rows}) > 1:
                what += ", with different golds"
            audit.duplicates.append(Finding(tuple(rows), what))
    return audit


def shared_questions(first: FileAudit, second: FileAudit) -> list[Finding]:
    """The questions that occur in two files, each with its last row in the first and in the second file."""
    ours, theirs = (
        {question_key(question.text): row for row, question in audit.questions.items()}
        for audit in (first, second)
    )
    return [
        Finding((row, theirs[key]), _excerpt(first.questions[row].text))
        for key, row in ours.items()
        if key in theirs
    ]


def audit_report(audits: Sequence[FileAudit], *, examples: int) -> str:
    """All audits as text, with the first `examples` findings of each kind."""
    lines = []
    for audit in audits:
        lines += _summary(audit)
        lines += _finding_lines("bad rows", audit.bad, examples)
        lines += _finding_lines("repeated questions", audit.duplicates, examples)
        lines += _finding_lines("golds empty after normalisation", audit.empty_golds, examples)
        lines.append("")
    if len(audits) > 1:
        pairs = [(*pair, shared_questions(*pair)) for pair in combinations(audits, 2)]
        lines.append(f"questions in two files: {sum(len(shared) for *_, shared in pairs):,}")
        for first, second, shared in pairs:
            if shared:
                lines += _finding_lines(f"{first.path.name} and {second.path.name}", shared, examples)
    return "\n".join(lines).rstrip()


def _summary(audit: FileAudit) -> list[str]:
    """Lines with the datasets of a file, the lengths of its texts, and its golds per question."""
    questions = list(audit.questions.values())
    datasets = Counter(question.dataset for question in questions)
    names = ", ".join(f"{name} {count:,}" for name, count in datasets.most_common())
    lines = [f"{audit.path}: {len(questions):,} questions ({names or 'none'})"]
    if not questions:
        return lines
    if datasets[UNNAMED]:
        lines.append(f"  questions without a dataset, scored as short answers: {datasets[UNNAMED]:,}")
    columns = {
        "characters per question": [len(question.text) for question in questions],
        "characters per gold": [len(gold) for question in questions for gold in question.answers],
        "golds per question": [len(question.answers) for question in questions],
    }
    for name, values in columns.items():
        numbers = " | ".join(f"{int(value):,}" for value in np.percentile(values, [0, 50, 95, 100]))
        lines.append(f"  {name}: {numbers} (minimum | median | 95 % | maximum)")
    return lines


def _finding_lines(title: str, findings: Sequence[Finding], examples: int) -> list[str]:
    lines = [f"  {title}: {len(findings):,}"]
    for finding in findings[:examples]:
        label = "row" if len(finding.rows) == 1 else "rows"
        lines.append(f"    {label} {', '.join(map(str, finding.rows))}: {finding.what}")
    if len(findings) > examples:
        lines.append(f"    and {len(findings) - examples:,} more (--examples)")
    return lines


def _excerpt(text: str) -> str:
    text = without_dapo_wrapper(text)
    return repr(text if len(text) <= 80 else f"{text[:60]} … {text[-15:]}")
