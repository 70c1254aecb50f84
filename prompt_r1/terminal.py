"""Text from outside on a terminal: colours of ours, and nothing that a reply could do to the screen."""

import os
import re
import sys
from typing import TextIO

# Controls but line feed and tab; what turns the direction of text; line separators; half characters.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COLOURS = {"dim": "2", "bold": "1", "green": "1;32", "cyan": "36", "yellow": "33"}


def printable(text: str) -> str:
    """The text with every character that could move the cursor, hide or reorder text shown as its code.

    Escape sequences of a hostile reply clear screens, set titles and, in some terminals, type commands.
    """
    return UNSAFE.sub(lambda match: _code(ord(match[0])), text.replace("\r\n", "\n"))


def _code(number: int) -> str:
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def has_colours(stream: TextIO) -> bool:
    """Does this stream show colours? Not in a file or pipe, nor where NO_COLOR (no-color.org) is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colour(name: str, text: str) -> str:
    """The text, already printable, between the escape sequences of one of COLOURS."""
    return f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if text else ""


def speak_any_language() -> None:
    """Let stdout and stderr replace what their encoding lacks, rather than end the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
