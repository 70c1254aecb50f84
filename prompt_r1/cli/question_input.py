"""The questions for infer.py: flags, files, standard input, keyboard."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from prompt_r1.errors import UsageError
from prompt_r1.foreign import json_object


def given_questions(*, question: str, file: str) -> list[str]:
    """The questions of --question, --questions or standard input; [] if a user at a terminal will type them.

    Raises UsageError if there is no question, or if both flags are given.
    """
    if question and file:
        raise UsageError("give --question or --questions, not both")
    if file and file != "-":
        return read_questions(Path(file))
    if question.strip() not in ("", "-"):
        return [_checked(question.strip(), "--question")]
    if not question and not file and sys.stdin.isatty():
        return []
    try:
        found = [_checked(line.strip(), "standard input") for line in sys.stdin if line.strip()]
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8") from None
    if not found:
        raise UsageError('nothing to ask: give --question "…", --questions FILE, or lines on standard input')
    return found


def read_questions(path: Path) -> list[str]:
    """Read the questions of a .txt or .jsonl file. Raises UsageError that names the file and the row."""
    if path.suffix not in (".txt", ".jsonl"):
        raise UsageError(f"--questions {path}: only files ending in .txt or .jsonl can be read")
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"--questions {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--questions {path}: the file is not UTF-8") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            text = line.strip() if path.suffix == ".txt" else _parse_row(path, number, line)
            found.append(_checked(text, f"--questions {path}, row {number}"))
    if not found:
        raise UsageError(f"--questions {path}: the file holds no questions")
    return found


def _parse_row(path: Path, number: int, line: str) -> str:
    text = json_object(line).get("question")
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f'--questions {path}, row {number}: expected a JSON object with a text "question"')
    return text.strip()


def _checked(text: str, where: str) -> str:
    """Return the text. Raises UsageError if it cannot be encoded as UTF-8."""
    if re.search("[\ud800-\udfff]", text):
        raise UsageError(f"{where}: the question contains half a character (a lone surrogate)")
    return text


def typed_questions() -> Iterator[str]:
    """Prompt for questions at the keyboard until an empty line or the end of input."""
    import readline  # noqa: F401  (editing and history for input)

    while True:
        try:
            text = input("\nask (an empty line ends): ").strip()
        except EOFError:
            print()
            return
        except UnicodeDecodeError:
            raise UsageError("the typed question is not UTF-8") from None
        if not text:
            return
        yield _checked(text, "typed")
