"""Print untrusted text safely on a terminal, and our own text in colour."""

import os
import re
import sys
from typing import TextIO

# Control characters except line feed and tab, bidi controls, line separators, lone surrogates.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COLOURS = {"dim": "2", "bold": "1", "green": "1;32", "cyan": "36", "yellow": "33"}


def printable(text: str) -> str:
    """Escape every character that could move the cursor or hide or reorder text, such as ESC as \\x1b.

    Escape sequences in a hostile reply can clear the screen, set the title and, in some terminals, enter
    commands.
    """
    return UNSAFE.sub(lambda match: _code(ord(match[0])), text.replace("\r\n", "\n"))


def _code(number: int) -> str:
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def has_colours(stream: TextIO) -> bool:
    """Whether to use colours: on a terminal, unless NO_COLOR (no-color.org) is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colour(name: str, text: str) -> str:
    """Wrap a printable text in the escape sequences of one of COLOURS."""
    return f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if text else ""


def escape_unprintable_output() -> None:
    """Let stdout and stderr escape characters that their encoding lacks instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
