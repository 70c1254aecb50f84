"""The questions for infer.py: flags, files, standard input, keyboard; and the check before it starts."""

import re
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from prompt_r1.cli.preflight import check_device, check_pair
from prompt_r1.config.pair import infer_config
from prompt_r1.errors import UsageError
from prompt_r1.foreign import json_object


def check_infer(arguments: list[str]) -> None:
    """Raise UsageError for a question that cannot be asked."""
    config = infer_config(arguments)
    check_device(config.device)
    if config.questions not in ("", "-") or config.question.strip() not in ("", "-"):
        given_questions(question=config.question.strip(), file=config.questions)
    elif not sys.stdin.isatty() and _is_empty(sys.stdin.buffer):
        given_questions(question="", file="-")  # raises: there is none
    check_pair(config.agent, config.env, config)


def _is_empty(stream: object) -> bool:
    """Whether standard input has ended. Looks ahead, and leaves the input to the program."""
    return isinstance(stream, BufferedReader) and not stream.peek(1)


def given_questions(*, question: str, file: str) -> list[str]:
    """The questions of --question, --questions or standard input; [] if a user at a terminal will type them.

    Raises UsageError if there is no question, or if both flags are given.
    """
    if question and file:
        raise UsageError("give --question or --questions, not both")
    if question not in ("", "-"):
        return [question]
    if not question and not file and sys.stdin.isatty():
        return []
    name = "standard input" if file in ("", "-") else f"--questions {file}"
    if Path(file).suffix not in ("", ".txt", ".jsonl"):
        raise UsageError(f"{name}: only files ending in .txt or .jsonl can be read")
    try:
        text = sys.stdin.read() if file in ("", "-") else Path(file).read_text("utf-8-sig")
        text.encode()  # standard input may have half a character for a byte that is not UTF-8
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    except UnicodeError:
        raise UsageError(f"{name} is not UTF-8") from None
    rows = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not rows:
        raise UsageError('nothing to ask: give --question "…", --questions FILE, or lines on standard input')
    if Path(file).suffix == ".jsonl":
        return [_question_of(line, f"{name}, row {number}") for number, line in rows]
    return [line for _, line in rows]


def _question_of(line: str, where: str) -> str:
    """The text of a row of a .jsonl file. Raises UsageError."""
    text = json_object(line).get("question")
    if not isinstance(text, str) or not text.strip() or re.search("[\ud800-\udfff]", text):
        raise UsageError(f'{where}: expected a JSON object with a text "question"')
    return text.strip()


def typed_questions() -> Iterator[str]:
    """Prompt for questions at the keyboard until an empty line or the end of input."""
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
