"""Markdown tables: the one writer for all tables of the project."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are aligned to the left, the others to the right.

    A pipe or a line break inside a cell is escaped, so that no text can break the table.
    """
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [_line(header), "|" + "|".join(marks) + "|"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
