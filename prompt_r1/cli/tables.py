"""Tables in Markdown and for the terminal."""

import re
from collections.abc import Sequence

from prompt_r1.terminal import printable_line


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format a table. The first `left` columns are left-aligned, the others right-aligned.

    Pipes, line breaks and unprintable characters in cells are escaped, so that no text can break the table.
    """
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [_line(header), "|" + "|".join(marks) + "|"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    # A backslash before a pipe would escape our own one, so it is doubled.
    shown = [re.sub(r"(\\*)\|", r"\1\1\\|", printable_line(cell)) for cell in cells]
    return "| " + " | ".join(shown) + " |"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align a table for a terminal: the first column to the left, the others to the right."""
    table = [[printable_line(cell) for cell in row] for row in (header, *rows)]
    first, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
    lines = [
        [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True))]
        for row in table
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)
