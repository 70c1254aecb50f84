"""Tables that fit the terminal's width."""

import shutil
import textwrap
from collections.abc import Sequence

from prompt_r1.terminal import printable_line

NARROWEST = 12  # columns that the first cell of a row keeps at least


def fitted_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, drop: Sequence[str] = (), width: int = 0
) -> str:
    """Align a table; the first column to the left, the others to the right.

    `width`: characters of a line (0: those of the terminal; 80 if there is none). Where the table is wider,
    the columns of `drop` are left out, one after the other; then the first cells are broken into lines.
    """
    width = width or shutil.get_terminal_size((80, 24)).columns
    table = [[printable_line(cell) for cell in row] for row in (header, *rows)]
    for name in drop:
        if _width(table) > width and name in table[0]:
            place = table[0].index(name)
            table = [row[:place] + row[place + 1 :] for row in table]
    others = _width([row[1:] for row in table]) + 2
    first = min(max(len(row[0]) for row in table), max(NARROWEST, width - others))
    widths = [max(len(row[place]) for row in table) for place in range(1, len(table[0]))]
    lines = []
    for row in table:
        begin, *rest = textwrap.wrap(row[0], first, subsequent_indent="  ") or [""]
        cells = [begin.ljust(first), *(cell.rjust(size) for cell, size in zip(row[1:], widths, strict=True))]
        lines += ["  ".join(cells).rstrip(), *rest]
    return "\n".join(lines)


def _width(table: Sequence[Sequence[str]]) -> int:
    columns = len(table[0])
    return sum(max(len(row[place]) for row in table) for place in range(columns)) + 2 * (columns - 1)
