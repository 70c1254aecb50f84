"""Tables as data, written as Markdown, CSV and LaTeX."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.evaluation.aggregate import Rate
from prompt_r1.terminal import printable_line

Label = tuple[str, ...]

MOST_COLUMNS = 6  # of a LaTeX table, beside the labels of its rows
FIT = r"""\ifdim\wd0>\textwidth\sbox0{\resizebox{\textwidth}{!}{\usebox0}}\fi
\ifdim\dimexpr\ht0+\dp0\relax>.85\textheight\sbox0{\resizebox*{!}{.85\textheight}{\usebox0}}\fi
\usebox0"""


@dataclass(frozen=True)
class Entry:
    """One cell of a table: a measured rate (from 0 to 1, shown in percent) or a plain number."""

    rate: Rate | None = None
    number: float | None = None
    best: bool = False
    paper: float | None = None  # the paper's number, in percent
    usual_n: int = 0  # questions of the dataset; a rate over fewer shows its own n


@dataclass(frozen=True)
class Table:
    """A table whose rows and columns have labels of one or more parts. Cells without an entry are empty."""

    name: str  # of its files: "table2"
    title: str
    headings: Label  # of the parts of a row's label
    rows: Sequence[Label]
    columns: Sequence[Label]
    entries: Mapping[tuple[Label, Label], Entry]
    notes: Sequence[str] = ()

    def entry(self, row: Label, column: Label) -> Entry:
        """A cell; an empty entry if nothing was measured."""
        return self.entries.get((row, column), Entry())

    @property
    def column_names(self) -> list[str]:
        return [_joined(column) for column in self.columns]


@dataclass(frozen=True)
class _Line:
    """A row as it is written: ours, or the paper's numbers below it."""

    label: Label
    entries: Sequence[Entry]
    paper: bool


def to_markdown(table: Table) -> str:
    """The table with intervals; below each row the paper's numbers, if it has any."""
    rows = []
    for line in _lines(table):
        cells = [_paper_text(entry) if line.paper else _markdown_text(entry) for entry in line.entries]
        rows.append([*line.label, *cells])
    header = [*table.headings, *table.column_names]
    text = f"### {printable_line(table.title)}\n\n{markdown_table(header, rows, left=len(table.headings))}"
    return "\n\n".join([text, *table.notes])


def to_csv(table: Table) -> str:
    """The layout of the table, with six digits and without intervals."""
    rows = []
    for line in _lines(table):
        values = [entry.paper if line.paper else _value(entry) for entry in line.entries]
        numbers = ["" if value is None else f"{value:.6g}" for value in values]
        rows.append([*map(_csv_text, line.label), *numbers])
    return _csv([[*map(_csv_text, [*table.headings, *table.column_names])], *rows])


def rates_to_csv(tables: Iterable[Table]) -> str:
    """One row for each measured rate of the tables: interval, n, errors and the paper's number."""
    rows: list[Sequence[object]] = [
        ["table", "row", "column", "percent", "low", "high", "n", "errors", "paper"]
    ]
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                entry = table.entry(row, column)
                if entry.rate is None:
                    continue
                rate, paper = entry.rate, "" if entry.paper is None else entry.paper
                percents = [f"{100 * value:.4f}" for value in (rate.mean, rate.low, rate.high)]
                names = [_csv_text(name) for name in (table.name, _joined(row), _joined(column))]
                rows.append([*names, *percents, rate.n, rate.errors, paper])
    return _csv(rows)


def to_latex(table: Table) -> str:
    """Booktabs tables with two decimals, as in the paper, and small intervals; they fit on a page.

    A table that is much wider than long is transposed, and one with many columns is split into several.
    """
    if len(table.columns) > max(MOST_COLUMNS, 2 * len(table.rows)):
        table = _transposed(table)
    count = math.ceil(len(table.columns) / MOST_COLUMNS) or 1
    size = math.ceil(len(table.columns) / count) or 1
    parts = [table.columns[start : start + size] for start in range(0, len(table.columns), size)]
    texts = [
        _latex_part(replace(table, columns=part), f" ({number} of {count})" if count > 1 else "")
        for number, part in enumerate(parts, start=1)
    ]
    return "\n".join(["% Needs \\usepackage{booktabs,graphicx}.", *texts])


def _transposed(table: Table) -> Table:
    """The table with rows as columns."""
    entries = {(column, row): entry for (row, column), entry in table.entries.items()}
    headings = ("",) * max(map(len, table.columns))
    return replace(table, headings=headings, rows=table.columns, columns=table.rows, entries=entries)


def _latex_part(table: Table, part: str) -> str:
    """One float. The table in it is made smaller if it is wider than the text or higher than the page."""
    caption = table.title.split(": ", 1)[-1]  # LaTeX numbers its tables itself
    caption = caption[:1].upper() + caption[1:]
    columns = []
    for column in table.columns:
        parts = [_escape(part) for part in column if part]
        columns.append(r"\shortstack{" + r"\\".join(parts) + "}")
    lines = [
        r"\begin{table*}[t]\centering\small\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{_escape(caption + part)}. In brackets: 95\,\% interval over questions.}}",
        r"\sbox0{\begin{tabular}{" + "l" * len(table.headings) + "r" * len(columns) + "}",
        r"\toprule",
        " & ".join([*map(_escape, table.headings), *columns]) + r" \\",
        r"\midrule",
    ]
    for line in _lines(table):
        cells = [_paper_text(entry) if line.paper else _latex_text(entry) for entry in line.entries]
        lines.append(" & ".join([*map(_escape, line.label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}%", FIT, r"\end{table*}", ""])


def _joined(label: Label) -> str:
    return " ".join(part for part in label if part)


def _csv_text(text: str) -> str:
    """A text as a cell. Spreadsheets would read one that begins with = + - @ as a formula without the '."""
    line = printable_line(text)
    return f"'{line}" if line.lstrip().startswith(("=", "+", "-", "@")) else line


def _csv(rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _lines(table: Table) -> Iterator[_Line]:
    """Each row, followed by a second one with the paper's numbers if it has any."""
    for row in table.rows:
        entries = [table.entry(row, column) for column in table.columns]
        yield _Line(row, entries, paper=False)
        if any(entry.paper is not None for entry in entries):
            label = (*[""] * (len(row) - 1), f"{row[-1]}, paper")
            yield _Line(label, entries, paper=True)


def _value(entry: Entry) -> float | None:
    return 100 * entry.rate.mean if entry.rate else entry.number


def _markdown_text(entry: Entry) -> str:
    rate = entry.rate
    if rate is None:
        return "–" if entry.number is None else _plain(entry.number)
    mean = f"**{100 * rate.mean:.1f}**" if entry.best else f"{100 * rate.mean:.1f}"
    return f"{mean} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]{_missing_questions(entry)}"


def _latex_text(entry: Entry) -> str:
    rate = entry.rate
    if rate is None:
        return "--" if entry.number is None else _plain(entry.number)
    mean = rf"\textbf{{{100 * rate.mean:.2f}}}" if entry.best else f"{100 * rate.mean:.2f}"
    interval = rf"{{\tiny [{100 * rate.low:.1f}, {100 * rate.high:.1f}]}}"
    return f"{mean} {interval}{_missing_questions(entry)}"


def _missing_questions(entry: Entry) -> str:
    """The n and the errors of a rate over fewer questions than the rest of the table."""
    assert entry.rate is not None
    parts = [f"n {entry.rate.n}"] if entry.rate.n != entry.usual_n else []
    parts += [f"{entry.rate.errors} errors"] if entry.rate.errors else []
    return f" ({', '.join(parts)})" if parts else ""


def _paper_text(entry: Entry) -> str:
    return "" if entry.paper is None else f"{entry.paper:.2f}"


def _plain(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.2f}" if number >= 0.01 or not number else f"{number:.2g}"


def _escape(text: str) -> str:
    replacements = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    replacements |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
    return "".join(replacements.get(letter, letter) for letter in printable_line(text))
