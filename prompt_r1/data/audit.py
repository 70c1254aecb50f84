"""Find problems in question files: bad rows, repeats, leaks between files, golds that nothing can match."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np

from prompt_r1.data.fields import question_key, without_dapo_wrapper
from prompt_r1.data.files import read_rows
from prompt_r1.metrics.text import normalise
from prompt_r1.types import Question

# A text has the first script here to which a tenth of its letters belong. Latin is last, because formulas
# contain Latin letters in every language.
SCRIPT_LETTERS = {
    "Japanese": re.compile("[\u3040-\u30ff]"),
    "Korean": re.compile("[\uac00-\ud7af]"),
    "Chinese": re.compile("[\u3400-\u4dbf\u4e00-\u9fff]"),
    "Cyrillic": re.compile("[\u0400-\u04ff]"),
    "Arabic": re.compile("[\u0600-\u06ff]"),
    "Hebrew": re.compile("[\u0590-\u05ff]"),
    "Thai": re.compile("[\u0e00-\u0e7f]"),
    "Devanagari": re.compile("[\u0900-\u097f]"),
    "Greek": re.compile("[\u0370-\u03ff]"),
    "Latin": re.compile("[A-Za-z\u00c0-\u024f]"),
}

CUT_OFF_START = re.compile(r"^\s*(?:[).,;:\]}?!]|\\n|\$\s)")
CUT_OFF_END = re.compile(
    r"(?:(?<!is )[,:;(\[{+]|\b(?:and|or|of|the|an|to|in|with|that|if|for))\s*$", re.IGNORECASE
)
SHORT_PROBLEM = 35  # characters; "Find $m+n$" has lost the definition of m and n


@dataclass(frozen=True)
class Finding:
    """A possible problem: its rows, from 1, and a description."""

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
    truncated: list[Finding] = field(default_factory=list)  # a guess
    scripts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Overlap:
    """The questions that occur in two files: a row of the first file, and one of the second."""

    first: Path
    second: Path
    findings: list[Finding]


def audit_file(path: Path) -> FileAudit:
    """Audit one file. Raises UsageError if the file as a whole cannot be read."""
    audit = FileAudit(path)
    rows_by_key: dict[str, list[int]] = {}
    for row in read_rows(path):
        if row.question is None:
            audit.bad.append(Finding((row.number,), row.reason))
            continue
        _audit_question(audit, row.number, row.question)
        rows_by_key.setdefault(question_key(row.question.text), []).append(row.number)
    for rows in rows_by_key.values():
        if len(rows) > 1:
            what = _excerpt(audit.questions[rows[0]].text)
            if len({audit.questions[row].answers for row in rows}) > 1:
                what += ", with different golds"
            audit.duplicates.append(Finding(tuple(rows), what))
    return audit


def _audit_question(audit: FileAudit, row: int, question: Question) -> None:
    audit.questions[row] = question
    audit.scripts[script_of(without_dapo_wrapper(question.text))] += 1
    empty = [gold for gold in question.answers if not normalise(gold)]
    if empty:
        only = " (no other gold)" if len(empty) == len(question.answers) else ""
        audit.empty_golds.append(Finding((row,), f"{', '.join(map(repr, empty))}{only}"))
    reason = truncation_reason(question)
    if reason:
        audit.truncated.append(Finding((row,), f"{reason}: {_excerpt(question.text)}"))


def overlaps(audits: Sequence[FileAudit]) -> list[Overlap]:
    """The pairs of files that share questions."""
    rows_by_key = {
        audit.path: {question_key(question.text): row for row, question in audit.questions.items()}
        for audit in audits
    }
    found = []
    for first, second in combinations(audits, 2):
        ours, theirs = rows_by_key[first.path], rows_by_key[second.path]
        findings = [
            Finding((row, theirs[key]), _excerpt(first.questions[row].text))
            for key, row in ours.items()
            if key in theirs
        ]
        if findings:
            found.append(Overlap(first.path, second.path, findings))
    return found


def script_of(text: str) -> str:
    """The script of a text, as a hint at its language. "Latin" may be any of many languages."""
    counts = {name: len(letters.findall(text)) for name, letters in SCRIPT_LETTERS.items()}
    total = sum(counts.values())
    for name, count in counts.items():
        if count and 10 * count >= total:
            return name
    return "no letters"


def truncation_reason(question: Question) -> str:
    """Why a question looks truncated, or "" if it does not. This is a guess, to be checked by a person."""
    text = without_dapo_wrapper(question.text)
    if CUT_OFF_START.search(text):
        return "begins in the middle"
    if CUT_OFF_END.search(text):
        return "ends in the middle"
    if question.kind == "math":
        dollars, opened, closed = (len(re.findall(rf"(?<!\\){mark}", text)) for mark in (r"\$", "{", "}"))
        if "\\" in text and (dollars % 2 or opened != closed):  # without a backslash, $ may mean money
            return "a formula is not closed"
        if len(text) < SHORT_PROBLEM:
            return "very short"
    return ""


def audit_report(audits: Sequence[FileAudit], *, examples: int) -> str:
    """All audits as text, with the first `examples` findings of each kind."""
    lines = []
    for audit in audits:
        lines += [_summary(audit), *_lengths(audit)]
        if audit.scripts:
            counts = [f"{name} {count:,}" for name, count in audit.scripts.most_common()]
            lines.append(f"  scripts: {', '.join(counts)}")
        lines += _finding_lines("bad rows", audit.bad, examples)
        lines += _finding_lines("repeated questions", audit.duplicates, examples)
        lines += _finding_lines("golds empty after normalisation", audit.empty_golds, examples)
        lines += _finding_lines("possibly truncated", audit.truncated, examples)
        lines.append("")
    if len(audits) > 1:
        shared = overlaps(audits)
        lines.append(f"questions in two files: {sum(len(overlap.findings) for overlap in shared):,}")
        for overlap in shared:
            title = f"{overlap.first.name} and {overlap.second.name}"
            lines += _finding_lines(title, overlap.findings, examples)
    return "\n".join(lines).rstrip()


def _summary(audit: FileAudit) -> str:
    datasets = Counter(question.dataset for question in audit.questions.values())
    names = ", ".join(f"{name} {count:,}" for name, count in datasets.most_common())
    return f"{audit.path}: {len(audit.questions):,} questions ({names or 'none'})"


def _lengths(audit: FileAudit) -> list[str]:
    """Lines with the minimum, median, 95th percentile and maximum of lengths and of golds per question."""
    questions = list(audit.questions.values())
    if not questions:
        return []
    columns = {
        "characters per question": [len(question.text) for question in questions],
        "characters per gold": [len(gold) for question in questions for gold in question.answers],
        "golds per question": [len(question.answers) for question in questions],
    }
    lines = []
    for name, values in columns.items():
        least, median, high, most = (f"{int(value):,}" for value in np.percentile(values, [0, 50, 95, 100]))
        lines.append(f"  {name}: {least} | {median} | {high} | {most} (minimum | median | 95 % | maximum)")
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
