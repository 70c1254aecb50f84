"""Text that is safe to print: no character of a reply or a file name acts on the terminal."""

import re
import unicodedata

# All characters but visible ASCII, tab and line break. Only these characters can be unsafe.
NOT_PLAIN = re.compile("[^ -~\t\n]")


def printable(text: str) -> str:
    """Escape every character that could move the cursor or hide or reorder text, such as ESC as \\x1b.

    These are the Unicode categories of control, format, surrogate, private and unassigned characters, and of
    line and paragraph separators. Escape sequences in a hostile reply can clear the screen, set the title
    and, in some terminals, enter commands.
    """
    return NOT_PLAIN.sub(lambda match: _escape_unsafe(match[0]), text.replace("\r\n", "\n"))


def printable_line(text: str) -> str:
    """A printable text on one line, for names in tables, titles and progress bars."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def _escape_unsafe(letter: str) -> str:
    if letter.isprintable() or unicodedata.category(letter) == "Zs":  # Zs: spaces of any width
        return letter
    return letter.encode("unicode_escape").decode()
