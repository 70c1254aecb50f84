"""The writer of all Markdown tables."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format a table. The first `left` columns are left-aligned, the others right-aligned.

    Pipes and line breaks in cells are escaped, so that no text can break the table.
    """
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [_line(header), "|" + "|".join(marks) + "|"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
