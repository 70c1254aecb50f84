"""The questions for infer.py: flag, standard input, keyboard; and the check before it starts."""

import sys
from collections.abc import Iterator
from io import BufferedReader

from prompt_r1.errors import UsageError
from prompt_r1.pair.settings import InferConfig, check_pair
from prompt_r1.programs.files import json_object
from prompt_r1.settings.flags import parse_arguments


def read_infer_config(arguments: list[str]) -> InferConfig:
    """The settings of infer.py. Raises UsageError for a question that cannot be asked."""
    config = parse_arguments(InferConfig, arguments)
    stream = None if config.question.strip() or sys.stdin.isatty() else sys.stdin.buffer
    if isinstance(stream, BufferedReader) and not stream.peek(1):  # looks ahead: the input is the program's
        given_questions("")  # raises: there is none
    check_pair(config)
    return config


def given_questions(question: str) -> list[str]:
    """The question, or the lines of standard input; [] if a user will type them. Raises UsageError."""
    if question.strip():
        return [question.strip()]
    if sys.stdin.isatty():
        return []
    try:
        text = sys.stdin.read()
        text.encode()  # there may be half a character for a byte that is not UTF-8
    except UnicodeError:
        raise UsageError("standard input is not UTF-8") from None
    questions = [line.strip() for line in text.split("\n") if line.strip()]
    if not questions:
        raise UsageError('nothing to ask: give --question "…", or lines on standard input')
    if "question" in json_object(questions[0]):
        raise UsageError("standard input holds JSON: give each question as a line of text")
    return questions


def typed_questions() -> Iterator[str]:
    """Prompt for questions at the keyboard until an empty line or the end of input."""
    import readline  # noqa: F401  (editing and history for input)

    try:
        yield from iter(lambda: input("\nask (an empty line ends): ").strip(), "")
    except EOFError:
        print()
