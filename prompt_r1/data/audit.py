"""What is wrong with files of questions: bad rows, repeats, leaks between files, golds nothing can match."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np

from prompt_r1.data.fields import bare_problem, question_key
from prompt_r1.data.files import Row, read_rows
from prompt_r1.metrics.text import normalise
from prompt_r1.types import Question

# The first script with a tenth of a text's letters names it: formulas bring Latin letters everywhere.
SCRIPTS = {
    "Japanese": "\u3040-\u30ff", "Korean": "\uac00-\ud7af", "Chinese": "\u3400-\u4dbf\u4e00-\u9fff",
    "Cyrillic": "\u0400-\u04ff", "Arabic": "\u0600-\u06ff", "Hebrew": "\u0590-\u05ff",
    "Thai": "\u0e00-\u0e7f", "Devanagari": "\u0900-\u097f", "Greek": "\u0370-\u03ff",
    "Latin": "A-Za-z\u00c0-\u024f",
}  # fmt: skip
SCRIPT_LETTERS = {name: re.compile(f"[{letters}]") for name, letters in SCRIPTS.items()}

DANGLING = re.compile(
    r"(?:(?<!is )[,:;(\[{+]|\b(?:and|or|of|the|an|to|in|with|that|if|for))\s*$", re.IGNORECASE
)
STRAY_START = re.compile(r"^\s*(?:[).,;:\]}?!]|\\n|\$\s)")
SHORT_PROBLEM = 35  # characters: "Find $m+n$" has lost what m and n are


@dataclass(frozen=True)
class Finding:
    """Something to look at: rows, counted from 1, and why."""

    rows: tuple[int, ...]
    what: str


@dataclass
class FileAudit:
    """One file. Questions by their row."""

    path: Path
    questions: dict[int, Question] = field(default_factory=dict)
    bad: list[Finding] = field(default_factory=list)
    duplicates: list[Finding] = field(default_factory=list)  # one for each repeated question
    empty_golds: list[Finding] = field(default_factory=list)
    truncated: list[Finding] = field(default_factory=list)  # a guess
    scripts: Counter[str] = field(default_factory=Counter)


def audit_file(path: Path) -> FileAudit:
    """All findings of one file. Raises UsageError for a file that cannot be read at all."""
    result = FileAudit(path)
    rows_by_key: dict[str, list[int]] = {}
    for row in read_rows(path):
        _audit_row(result, row)
        if row.question is not None:
            rows_by_key.setdefault(question_key(row.question.text), []).append(row.number)
    for rows in rows_by_key.values():
        if len(rows) > 1:
            golds = {result.questions[row].answers for row in rows}
            other = ", with other golds" if len(golds) > 1 else ""
            result.duplicates.append(Finding(tuple(rows), _shown(result.questions[rows[0]].text) + other))
    return result


def overlaps(audits: Sequence[FileAudit]) -> dict[tuple[Path, Path], list[Finding]]:
    """Questions that two files share: rows of the first, then of the second file."""
    keys = [{question_key(q.text): row for row, q in audit.questions.items()} for audit in audits]
    shared: dict[tuple[Path, Path], list[Finding]] = {}
    for first, second in combinations(range(len(audits)), 2):
        common = [key for key in keys[first] if key in keys[second]]
        if common:
            shared[audits[first].path, audits[second].path] = [
                Finding(
                    (keys[first][key], keys[second][key]),
                    _shown(audits[first].questions[keys[first][key]].text),
                )
                for key in common
            ]
    return shared


def _audit_row(result: FileAudit, row: Row) -> None:
    if row.question is None:
        result.bad.append(Finding((row.number,), row.reason))
        return
    result.questions[row.number] = row.question
    result.scripts[script_of(bare_problem(row.question.text))] += 1
    empty = [gold for gold in row.question.answers if not normalise(gold)]
    if empty:
        none_left = " (no other gold)" if len(empty) == len(row.question.answers) else ""
        result.empty_golds.append(Finding((row.number,), f"{', '.join(map(repr, empty))}{none_left}"))
    if why := why_truncated(row.question):
        result.truncated.append(Finding((row.number,), f"{why}: {_shown(row.question.text)}"))


def script_of(text: str) -> str:
    """The script of a text, as a guess at its language: "Latin" may be any language written so."""
    counts = {name: len(letters.findall(text)) for name, letters in SCRIPT_LETTERS.items()}
    total = sum(counts.values())
    return next((name for name, count in counts.items() if count and 10 * count >= total), "no letters")


def why_truncated(question: Question) -> str:
    """Why a question looks as if a part of it were missing; "" if it does not. A guess, to be looked at."""
    text = bare_problem(question.text)
    if STRAY_START.search(text):
        return "begins in the middle"
    if DANGLING.search(text):
        return "ends in the middle"
    if question.kind == "math":
        dollars, opened, closed = (len(re.findall(rf"(?<!\\){mark}", text)) for mark in (r"\$", "{", "}"))
        if "\\" in text and (dollars % 2 or opened != closed):  # without a backslash, $ may be money
            return "a formula is not closed"
        if len(text) < SHORT_PROBLEM:
            return "very short"
    return ""


def report(audits: Sequence[FileAudit], *, examples: int) -> str:
    """All audits as a text; of each kind of finding the first `examples`."""
    lines = []
    for audit in audits:
        lines += [_summary(audit), *_lengths(audit)]
        if audit.scripts:
            lines.append(
                "  scripts: " + ", ".join(f"{name} {n:,}" for name, n in audit.scripts.most_common())
            )
        for title, findings in [
            ("bad rows", audit.bad),
            ("repeated questions", audit.duplicates),
            ("golds empty after normalisation", audit.empty_golds),
            ("perhaps truncated", audit.truncated),
        ]:
            lines += _listed(f"  {title}: {len(findings):,}", findings, examples)
        lines.append("")
    shared = overlaps(audits)
    if len(audits) > 1:
        lines.append(f"questions in two files: {sum(map(len, shared.values())):,}")
    for (first, second), findings in shared.items():
        lines += _listed(f"  {first.name} and {second.name}: {len(findings):,}", findings, examples)
    return "\n".join(lines).rstrip()


def _summary(audit: FileAudit) -> str:
    datasets = Counter(question.dataset for question in audit.questions.values())
    names = ", ".join(f"{name} {count:,}" for name, count in datasets.most_common())
    return f"{audit.path}: {len(audit.questions):,} questions ({names or 'none'})"


def _lengths(audit: FileAudit) -> list[str]:
    """Characters of questions and golds, golds a question: least, median, 95th percentile, most."""
    questions = list(audit.questions.values())
    if not questions:
        return []
    columns = {
        "characters of a question": [len(question.text) for question in questions],
        "characters of a gold": [len(gold) for question in questions for gold in question.answers],
        "golds of a question": [len(question.answers) for question in questions],
    }
    return [
        f"  {name}: " + " | ".join(f"{int(value):,}" for value in np.percentile(values, [0, 50, 95, 100]))
        + " (least | median | 95 % | most)"
        for name, values in columns.items()
    ]  # fmt: skip


def _listed(title: str, findings: Sequence[Finding], examples: int) -> list[str]:
    lines = [title]
    for finding in findings[:examples]:
        rows = ", ".join(map(str, finding.rows))
        lines.append(f"    row{'s' if len(finding.rows) > 1 else ''} {rows}: {finding.what}")
    if len(findings) > examples:
        lines.append(f"    and {len(findings) - examples:,} more (--examples)")
    return lines


def _shown(text: str) -> str:
    text = bare_problem(text)
    return repr(text if len(text) <= 80 else f"{text[:60]} … {text[-15:]}")
