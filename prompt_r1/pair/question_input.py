"""The questions for infer.py: flag, standard input, keyboard."""

import sys
from collections.abc import Iterator

from prompt_r1.errors import UsageError
from prompt_r1.programs.files import json_object


def given_questions(question: str) -> list[str]:
    """The question, or the lines of standard input; [] if a user will type questions. Raises UsageError."""
    if question.strip():
        return [question.strip()]
    if sys.stdin.isatty():
        return []
    try:
        text = sys.stdin.read()
        text.encode()  # Python may have read a byte that is not UTF-8 as half a character, which fails here.
    except UnicodeError:
        raise UsageError("standard input is not UTF-8") from None
    questions = [line.strip() for line in text.split("\n") if line.strip()]
    if not questions:
        raise nothing_to_ask()
    if "question" in json_object(questions[0]):
        raise UsageError("standard input holds JSON: give each question as a line of text")
    return questions


def nothing_to_ask() -> UsageError:
    """The error if neither a flag nor standard input has a question."""
    return UsageError('nothing to ask: give --question "…", or lines on standard input')


def typed_questions() -> Iterator[str]:
    """Prompt for questions at the keyboard until an empty line or the end of input."""
    import readline  # noqa: F401  (editing and history for input)

    try:
        while question := input("\nask (an empty line ends): ").strip():
            yield question
    except EOFError:
        print()
