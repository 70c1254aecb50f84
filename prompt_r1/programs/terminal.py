"""Print untrusted text safely, and progress where there is no terminal."""

import io
import os
import re
import sys
import unicodedata
from typing import Any

NOT_PLAIN = re.compile("[^ -~\t\n]")  # everything but visible ASCII: the only characters worth looking up
# Characters; a shorter key ("EMPTY", "ollama") is a placeholder that replies may contain.
SHORTEST_SECRET = 12


def printable(text: str) -> str:
    """Escape every character that could move the cursor or hide or reorder text, such as ESC as \\x1b.

    These are the Unicode categories of control, format, surrogate, private and unassigned characters, and of
    line and paragraph separators. Escape sequences in a hostile reply can clear the screen, set the title
    and, in some terminals, enter commands.
    """
    return NOT_PLAIN.sub(lambda match: _escape_unsafe(match[0]), text.replace("\r\n", "\n"))


def printable_line(text: str) -> str:
    """A printable text on one line: for names in tables, titles and progress bars."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def _escape_unsafe(letter: str) -> str:
    is_safe = letter.isprintable() or unicodedata.category(letter) == "Zs"
    return letter if is_safe else letter.encode("unicode_escape").decode()


def scrub(text: str, key: str) -> str:
    """Replace the key in a text, in upper or lower case, by "[key]"."""
    if not key or key.lower() not in text.lower():  # much faster than the search below in a long text
        return text
    return re.sub(re.escape(key), "[key]", text, flags=re.IGNORECASE)


class _Lines(io.TextIOBase):
    """Writes each state of a progress bar on a line of its own: a log file shows no carriage return."""

    def write(self, text: str) -> int:
        if line := text.strip("\r\n "):
            print(line, file=sys.stderr, flush=True)
        return len(text)


def progress_style() -> dict[str, Any]:
    """Arguments of tqdm: without a terminal, a line every ten seconds, and none in the first ten."""
    return {} if sys.stderr.isatty() else {"file": _Lines(), "mininterval": 10, "delay": 10}


def prepare_standard_streams() -> None:
    """Let stdout and stderr escape what their encoding lacks; a closed stream (`>&-`) is the null device."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
