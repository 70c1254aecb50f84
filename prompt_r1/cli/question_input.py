"""The questions that a user wants to be asked: from flags, files, standard input or the keyboard."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from prompt_r1.errors import UsageError


def questions_of(*, question: str, file: str) -> list[str]:
    """What --question, --questions and standard input ask; [] where a person at a terminal is to be asked.

    Raises UsageError where there is nothing to ask, or two things.
    """
    if question and file:
        raise UsageError("give --question or --questions, not both")
    if file and file != "-":
        return read_questions(Path(file))
    if question.strip() not in ("", "-"):
        return [question.strip()]
    if not question and not file and sys.stdin.isatty():
        return []
    found = [line.strip() for line in sys.stdin if line.strip()]
    if not found:
        raise UsageError('nothing to ask: give --question "…", --questions FILE, or lines on standard input')
    return found


def read_questions(path: Path) -> list[str]:
    """The questions of a .txt or .jsonl file. Raises UsageError that names the file and the line."""
    if path.suffix not in (".txt", ".jsonl"):
        raise UsageError(f"--questions {path}: only files ending in .txt or .jsonl can be read")
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"--questions {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--questions {path}: the file is not UTF-8") from None
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    found = [
        line.strip() if path.suffix == ".txt" else _question_in(path, number, line) for number, line in rows
    ]
    if not found:
        raise UsageError(f"--questions {path}: the file holds no questions")
    return found


def _question_in(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["question"].strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        text = ""
    if not text:
        raise UsageError(f'--questions {path}, row {number}: a JSON object with a text "question" is wanted')
    return text


def typed() -> Iterator[str]:
    """Questions that a person types, until an empty line or the end of input."""
    import readline  # noqa: F401  (editing and history for input)

    while True:
        try:
            text = input("\nask (an empty line ends): ").strip()
        except EOFError:
            print()
            return
        if not text:
            return
        yield text
