"""Tables as data, and as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prompt_r1.evaluation.aggregate import Cell

Label = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One place of a table: a measured rate (`cell`, from 0 to 1, shown in percent) or a plain number."""

    cell: Cell | None = None
    number: float | None = None
    best: bool = False
    paper: float | None = None  # what the paper has here, in percent
    usual_n: int = 0  # questions of the dataset; fewer are told in the place itself


@dataclass(frozen=True)
class Table:
    """`heads` name the parts of a row's label. A place without an entry was not measured."""

    name: str  # of its files: "table2"
    title: str
    heads: Label
    rows: Sequence[Label]
    columns: Sequence[Label]
    entries: Mapping[tuple[Label, Label], Entry]
    notes: Sequence[str] = ()

    def entry(self, row: Label, column: Label) -> Entry:
        """What stands in a cell; an empty entry where nothing does."""
        return self.entries.get((row, column), Entry())


def markdown(table: Table) -> str:
    """The table with its intervals; under each row what the paper reports, where it does."""
    columns = [" ".join(filter(None, column)) for column in table.columns]
    lines = [
        f"### {table.title}",
        "",
        markdown_row([*table.heads, *columns]),
        "|" + "---|" * len(table.heads) + "---:|" * len(columns),
    ]
    for row, paper in _rows_and_papers(table):
        texts = [_paper_text(entry) if paper else _markdown_text(entry) for entry in _entries(table, row)]
        lines.append(markdown_row([*_row_label(row, paper), *texts]))
    notes = [line for note in table.notes for line in ("", note)]
    return "\n".join([*lines, *notes])


def comma_separated(table: Table) -> str:
    """The layout of the table: percents and plain numbers in full precision, without intervals."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*table.heads, *(" ".join(filter(None, column)) for column in table.columns)])
    for row, paper in _rows_and_papers(table):
        values = [entry.paper if paper else _value(entry) for entry in _entries(table, row)]
        writer.writerow(
            [*_row_label(row, paper), *("" if value is None else f"{value:.6g}" for value in values)]
        )
    return file.getvalue()


def every_cell(tables: Iterable[Table]) -> str:
    """CSV, a line for each measured place of the tables: interval, n, errors, and the paper's number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["table", "row", "column", "percent", "low", "high", "n", "errors", "paper"])
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                entry = table.entry(row, column)
                if entry.cell is None:
                    continue
                rates = [100 * rate for rate in (entry.cell.mean, entry.cell.low, entry.cell.high)]
                names = [table.name, " ".join(filter(None, row)), " ".join(filter(None, column))]
                numbers = [f"{rate:.4f}" for rate in rates]
                paper = "" if entry.paper is None else entry.paper
                writer.writerow([*names, *numbers, entry.cell.n, entry.cell.errors, paper])
    return file.getvalue()


def latex(table: Table) -> str:
    """A booktabs table: two decimals as in the paper, the interval small beside them."""
    caption = table.title.split(": ", 1)[-1]  # LaTeX counts its tables itself
    caption = caption[:1].upper() + caption[1:]
    columns = [
        r"\shortstack{" + r"\\".join(map(_escape, filter(None, column))) + "}" for column in table.columns
    ]
    lines = [
        r"\begin{table*}[t]\centering\small\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{_escape(caption)}. In brackets: 95\,\% interval over questions.}}",
        r"\begin{tabular}{" + "l" * len(table.heads) + "r" * len(columns) + "}",
        r"\toprule",
        " & ".join([*map(_escape, table.heads), *columns]) + r" \\",
        r"\midrule",
    ]
    for row, paper in _rows_and_papers(table):
        texts = [_paper_text(entry) if paper else _latex_text(entry) for entry in _entries(table, row)]
        lines.append(" & ".join([*map(_escape, _row_label(row, paper)), *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table*}", ""])


def _rows_and_papers(table: Table) -> Iterable[tuple[Label, bool]]:
    """Each row; then again, as the paper's, where the paper has a number in it."""
    for row in table.rows:
        yield row, False
        if any(entry.paper is not None for entry in _entries(table, row)):
            yield row, True


def _row_label(row: Label, paper: bool) -> Label:
    return (*("" for _ in row[:-1]), f"{row[-1]}, paper") if paper else row


def _entries(table: Table, row: Label) -> list[Entry]:
    return [table.entry(row, column) for column in table.columns]


def _value(entry: Entry) -> float | None:
    return 100 * entry.cell.mean if entry.cell else entry.number


def _markdown_text(entry: Entry) -> str:
    cell = entry.cell
    if cell is None:
        return "–" if entry.number is None else _plain(entry.number)
    mean = f"**{100 * cell.mean:.1f}**" if entry.best else f"{100 * cell.mean:.1f}"
    return f"{mean} [{100 * cell.low:.1f}, {100 * cell.high:.1f}]{_lost(entry)}"


def _latex_text(entry: Entry) -> str:
    cell = entry.cell
    if cell is None:
        return "--" if entry.number is None else _plain(entry.number)
    mean = rf"\textbf{{{100 * cell.mean:.2f}}}" if entry.best else f"{100 * cell.mean:.2f}"
    return rf"{mean} {{\tiny [{100 * cell.low:.1f}, {100 * cell.high:.1f}]}}{_lost(entry)}"


def _lost(entry: Entry) -> str:
    """What a reader must know of a rate that is of fewer questions than its neighbours."""
    assert entry.cell is not None
    parts = [f"n {entry.cell.n}"] if entry.cell.n != entry.usual_n else []
    parts += [f"{entry.cell.errors} errors"] if entry.cell.errors else []
    return f" ({', '.join(parts)})" if parts else ""


def _paper_text(entry: Entry) -> str:
    return "" if entry.paper is None else f"{entry.paper:.2f}"


def _plain(number: float) -> str:
    return (
        f"{number:,.0f}"
        if number >= 100
        else f"{number:.2f}"
        if number >= 0.01 or not number
        else f"{number:.2g}"
    )


def markdown_row(texts: Iterable[str]) -> str:
    """A row of a Markdown table; a pipe in a text does not end its cell."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _escape(text: str) -> str:
    replacements = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(
        replacements.get(letter, "\\" + letter if letter in "&%$#_{}" else letter) for letter in text
    )
