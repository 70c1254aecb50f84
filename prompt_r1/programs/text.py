"""Text that is safe to print or to write: no character acts on the terminal, and there is no key in it."""

import os
import re
import unicodedata

# All characters but visible ASCII, tab and line break. Only these characters can be unsafe.
NOT_PLAIN = re.compile("[^ -~\t\n]")
# A key of fewer characters ("EMPTY", "ollama") is a placeholder, which replies may contain.
MIN_SECRET_LENGTH = 12
# Names of environment variables that hold a secret, such as OPENAI_API_KEY, HF_TOKEN and WANDB_API_KEY.
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


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


def without_keys(text: str) -> str:
    """The text without the values of environment variables that hold a secret, in upper or lower case."""
    for name, value in os.environ.items():
        secret = value.strip()
        if not SECRET_NAME.search(name) or len(secret) < MIN_SECRET_LENGTH:
            continue
        # In a long text, this test is much faster than the search.
        if secret.lower() in text.lower():
            text = re.sub(re.escape(secret), "[key]", text, flags=re.IGNORECASE)
    return text
