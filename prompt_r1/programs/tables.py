"""Tables in Markdown and for the terminal."""

import re
from collections.abc import Sequence

from prompt_r1.programs.text import printable_line

Rows = Sequence[Sequence[str]]


def markdown_table(header: Sequence[str], rows: Rows, *, left: int = 1) -> str:
    """Format a table in Markdown, which is also aligned as text.

    The first `left` columns are aligned to the left, the others to the right. Pipes, line breaks and
    unprintable characters in cells are escaped, so that no text can break the table.
    """
    marks = ["---"] * left + ["--:"] * (len(header) - left)
    table = [[_escaped(cell) for cell in row] for row in (header, marks, *rows)]
    aligned = _aligned(table, left)
    aligned[1] = [cell.replace(" ", "-") for cell in aligned[1]]  # Dashes fill the marks to the full width.
    return "\n".join(f"| {' | '.join(row)} |" for row in aligned)


def _escaped(cell: str) -> str:
    """A cell in which no pipe ends the cell."""
    # Double the backslashes before a pipe, then escape the pipe: \| becomes \\\|.
    return re.sub(r"(\\*)\|", r"\1\1\\|", printable_line(cell))


def text_table(header: Sequence[str], rows: Rows) -> str:
    """Align a table for a terminal: the first column to the left, the others to the right."""
    table = [[printable_line(cell) for cell in row] for row in (header, *rows)]
    return "\n".join("  ".join(row).rstrip() for row in _aligned(table, 1))


def _aligned(table: Rows, left: int) -> list[list[str]]:
    """Pad the cells of each column to the width of its longest cell."""
    columns = []
    for number, column in enumerate(zip(*table, strict=True)):
        width = max(len(cell) for cell in column)
        if number < left:
            columns.append([cell.ljust(width) for cell in column])
        else:
            columns.append([cell.rjust(width) for cell in column])
    return [list(row) for row in zip(*columns, strict=True)]
