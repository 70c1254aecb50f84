"""Tables as data, written as Markdown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.evaluation.aggregate import Rate
from prompt_r1.metrics.statistics import bounds_text
from prompt_r1.terminal import printable_line

Label = tuple[str, ...]


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
    """Cells by the labels of their row and column, of one or more parts. Those without an entry are empty."""

    title: str
    headings: Label  # of the parts of a row's label
    entries: Mapping[tuple[Label, Label], Entry]

    @property
    def rows(self) -> list[Label]:
        return list(dict.fromkeys(row for row, _ in self.entries))

    @property
    def columns(self) -> list[Label]:
        return list(dict.fromkeys(column for _, column in self.entries))

    def entry(self, row: Label, column: Label) -> Entry:
        """A cell; an empty entry if nothing was measured."""
        return self.entries.get((row, column), Entry())


def to_markdown(table: Table) -> str:
    """The table with intervals; below each row the paper's numbers, if it has any."""
    header = [*table.headings, *map(_joined, table.columns)]
    cells = markdown_table(header, list(_rows(table)), left=len(table.headings))
    return f"### {printable_line(table.title)}\n\n{cells}"


def _joined(label: Label) -> str:
    return " ".join(part for part in label if part)


def _rows(table: Table) -> Iterator[list[str]]:
    """The labels and cells of each row, followed by a row with the paper's numbers if it has any."""
    for row in table.rows:
        entries = [table.entry(row, column) for column in table.columns]
        yield [*row, *map(_markdown_text, entries)]
        if any(entry.paper is not None for entry in entries):
            papers = ["" if entry.paper is None else f"{entry.paper:.2f}" for entry in entries]
            yield [*[""] * (len(row) - 1), f"{row[-1]}, paper", *papers]


def _markdown_text(entry: Entry) -> str:
    rate = entry.rate
    if rate is None:
        return "–" if entry.number is None else _plain(entry.number)
    mean = f"**{100 * rate.mean:.1f}**" if entry.best else f"{100 * rate.mean:.1f}"
    return f"{mean} {bounds_text(100 * rate.low, 100 * rate.high, '.1f')}{_missing_questions(entry)}"


def _missing_questions(entry: Entry) -> str:
    """The n and the errors of a rate over fewer questions than the rest of the table."""
    assert entry.rate is not None
    parts = [f"n {entry.rate.n}"] if entry.rate.n != entry.usual_n else []
    parts += [f"{entry.rate.errors} errors"] if entry.rate.errors else []
    return f" ({', '.join(parts)})" if parts else ""


def _plain(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.2f}" if number >= 0.01 or not number else f"{number:.2g}"
