"""The tables of an evaluation, from scored predictions.

There are three forms:

    terminal_table    a row for each system
    datasets_table    a row for each system and dataset
    paper_tables      the paper's Tables 2, 3 and 5: a row for each dataset and metric, a column for each
                      system. The ablations of the paper's Table 4 are columns of Tables 2 and 3

The first two have the columns of `columns_of`. The test after a training writes a `datasets_table` of fewer
columns (after_training.py).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_r1.data.datasets import OUT_OF_DISTRIBUTION, TRAINED
from prompt_r1.evaluation.intervals import bounds_text
from prompt_r1.evaluation.paper_numbers import paper_number
from prompt_r1.evaluation.predictions import System, short_names
from prompt_r1.evaluation.scores import LABELS, METRICS_OF_KIND, Means, Rate, Results
from prompt_r1.miniworld.questions import OOD_KINDS
from prompt_r1.programs.files import replace_file
from prompt_r1.programs.tables import markdown_table, text_table
from prompt_r1.programs.text import printable_line

TABLES, RESULTS = "tables.md", "results.json"  # files in the folder of an evaluation
UNKNOWN = "–"
EMPTY = {"0", UNKNOWN}  # The terminal does not show a column with nothing else.
WIDTH = 80  # characters in a line of the table for the terminal
SPARE_COLUMNS = ("tokens", "turns", "format")  # The first is left out first.


def write_results(folder: Path, results: Results, trained_with: Mapping[str, str]) -> None:
    """Write tables.md (all tables but the terminal's) and results.json (means, intervals, costs).

    `trained_with`: agent → the environment of its training.
    """
    means = {}
    for system, name in short_names(results.systems).items():
        means[name] = results.micro_means(system).as_json()
    replace_file(folder / RESULTS, (json.dumps(means, indent=1) + "\n").encode())

    parts = [datasets_table(results, columns_of(results, with_interval=results.labels))]
    if "text" in results.kinds.values() and "ssim" not in results.labels:
        parts.append("SSim was not measured: `--ssim-model DIR` names its encoder.")
    parts += paper_tables(results, trained_with)
    replace_file(folder / TABLES, ("\n\n".join(parts) + "\n").encode())


@dataclass(frozen=True)
class Column:
    """A column of means: its label, and how its cells are written."""

    label: str
    text: Callable[[Means], str]


def cells_of(means: Means, columns: Sequence[Column]) -> list[str]:
    """A row of a table: the cells of these columns."""
    return [column.text(means) for column in columns]


N = Column("n", lambda means: str(means.n))
ERRORS = Column("errors", lambda means: str(means.errors))
TOKENS = Column("tokens", lambda means: f"{means.tokens:,.0f}")
DOLLARS = Column("$", lambda means: f"{means.counts.get('usd', 0):.2g}")


def rate_column(metric: str, label: str, *, interval: bool) -> Column:
    """The column of a metric, with or without its interval."""

    def text(means: Means) -> str:
        rate = means.rates.get(metric)
        if rate is None:
            return UNKNOWN
        bounds = f" {bounds_text(rate.low, rate.high, '.2f')}" if interval else ""
        return f"{rate.mean:.3f}{bounds}"

    return Column(label, text)


def count_column(name: str) -> Column:
    """The column of a mean that is no metric, such as the turns of a game."""
    return Column(name, lambda means: f"{means.counts[name]:.2f}" if name in means.counts else UNKNOWN)


def columns_of(results: Results, *, with_interval: Collection[str]) -> list[Column]:
    """All columns of an evaluation. The metrics `with_interval` show their intervals."""
    columns = [N, ERRORS]
    for metric, label in results.labels.items():
        columns.append(rate_column(metric, label, interval=metric in with_interval))
    columns += [count_column(name) for name in ("format", "turns", "calls")]
    return [*columns, TOKENS, DOLLARS]


def terminal_table(results: Results) -> str:
    """A row for each system, over all datasets.

    EM and a user's own metrics have intervals. Empty columns are left out. A table that is wider than WIDTH
    loses columns that `datasets_table` has too. If it is still too wide, numbers stand for environments and
    agents, which are named below the table.
    """
    rows = [results.micro_means(system) for system in results.systems]
    cells = {"method": list(short_names(results.systems).values())}
    for column in columns_of(results, with_interval=["em", *results.own_metrics]):
        texts = [column.text(row) for row in rows]
        if column is N or not EMPTY.issuperset(texts):
            cells[column.label] = texts
    for spare in SPARE_COLUMNS:
        if _width(cells) > WIDTH:
            cells.pop(spare, None)
    names_below: list[str] = []
    if _width(cells) > WIDTH:
        cells["method"], names_below = _numbered(results.systems)
    return "\n".join([_text_table(cells), *names_below])


def _text_table(cells: Mapping[str, Sequence[str]]) -> str:
    """A table for the terminal, from the cells of each column by its label."""
    rows = list(zip(*cells.values(), strict=True))
    return text_table(list(cells), rows)


def _width(cells: Mapping[str, Sequence[str]]) -> int:
    """The length of the longest line of a table."""
    return max(len(line) for line in _text_table(cells).splitlines())


def _numbered(systems: Sequence[System]) -> tuple[list[str], list[str]]:
    """The systems by their methods and a number, and the lines that say what the numbers stand for."""
    short: list[str] = []
    lines: list[str] = []
    for system, name in short_names(systems).items():
        if name == system.method:
            short.append(name)
        else:
            number = len(lines) + 1
            short.append(f"{system.method} [{number}]")
            lines.append(f"[{number}] {name}")
    return short, lines


def datasets_table(results: Results, columns: Sequence[Column]) -> str:
    """A Markdown table: a row for each system and dataset, then a row for all datasets of the system."""
    names = short_names(results.systems)
    rows = []
    for system in results.systems:
        datasets = [name for name in results.kinds if (system, name) in results.groups]
        for name in datasets:
            means = results.micro_means(system, [name])
            rows.append([names[system], name, *cells_of(means, columns)])
        if len(datasets) > 1:
            means = results.micro_means(system, datasets)
            rows.append([names[system], "**all**", *cells_of(means, columns)])
    labels = [column.label for column in columns]
    return markdown_table(["method", "dataset", *labels], rows, left=2)


def paper_tables(results: Results, trained_with: Mapping[str, str]) -> list[str]:
    """The tables that the predictions can fill. `trained_with`: agent → the environment of its training."""
    out_of_distribution = [name for name in results.kinds if name in (*OUT_OF_DISTRIBUTION, *OOD_KINDS)]
    trained = [name for name in results.kinds if name not in out_of_distribution]
    environments = list(dict.fromkeys(system.environment for system in results.systems if system.environment))
    tables = []
    for environment in environments or [""]:
        # A system without an environment is in the tables of every environment.
        systems = [system for system in results.systems if system.environment in (environment, "")]
        table = PaperTable(results, dict.fromkeys(systems, environment), trained_with)
        where = f", environment {environment}" if environment else ""
        if trained:
            tables.append(table.markdown(f"Table 2: results{where}", trained))
        if out_of_distribution:
            title = f"Table 3: results out of distribution{where}"
            tables.append(table.markdown(title, out_of_distribution))

    direct = [system for system in results.systems if system.method == "direct"]
    full = [system for system in results.systems if system.method == "prompt-r1"]
    if len(full) > 1:
        own_environments = {system: system.environment for system in (*direct, *full)}
        table = PaperTable(results, own_environments, trained_with)
        homes = ", ".join(f"{agent} was trained with {home}" for agent, home in trained_with.items())
        title = f"Table 5: transfer between environments ({homes})"
        tables.append(table.markdown(title, list(results.kinds)))
    return tables


@dataclass(frozen=True)
class PaperTable:
    """A table in the paper's form, with the paper's numbers below ours."""

    results: Results
    # The system of a column → the environment of the paper's numbers that stand below ours.
    systems: Mapping[System, str]
    trained_with: Mapping[str, str]  # agent → environment

    def markdown(self, title: str, datasets: Sequence[str]) -> str:
        """Rows for each dataset and metric, then for the averages over the datasets."""
        rows = []
        for name in datasets:
            for metric in METRICS_OF_KIND[self.results.kinds[name]]:
                if metric in self.results.labels:
                    rows += self._rows(name, [name], metric)
        if len(datasets) > 1:
            for metric in LABELS:
                if any(self._rates(datasets, metric)):
                    rows += self._rows("Average", datasets, metric)
        names = short_names(self.systems)
        table = markdown_table(["dataset", "metric", *names.values()], rows, left=2)
        return f"### {printable_line(title)}\n\n{table}"

    def _rows(self, label: str, datasets: Sequence[str], metric: str) -> list[list[str]]:
        """The row of our rates in percent, the best in bold; if the paper has rates, its row comes second."""
        rates = self._rates(datasets, metric)
        measured = [rate for rate in rates if rate is not None]
        n = max((rate.n for rate in measured), default=0)
        best = max((rate.mean for rate in measured), default=0.0)
        percents = [_percent_text(rate, n, best) for rate in rates]
        ours = [f"{label} (n = {n})", LABELS[metric], *percents]
        papers = self._paper_numbers(datasets, metric)
        if not any(papers):
            return [ours]
        return [ours, ["", f"{LABELS[metric]}, paper", *papers]]

    def _rates(self, datasets: Sequence[str], metric: str) -> list[Rate | None]:
        """The rate of each system; None for a system that was not measured on all datasets."""
        return [self.results.macro_average(system, datasets, metric) for system in self.systems]

    def _paper_numbers(self, datasets: Sequence[str], metric: str) -> list[str]:
        """The paper's number for each system, "" where it has none."""
        # The paper's averages are over all datasets of its Table 2 or 3.
        is_whole_table = set(datasets) in (set(TRAINED), set(OUT_OF_DISTRIBUTION))
        if len(datasets) > 1 and not is_whole_table:
            return []
        numbers = []
        for system, environment in self.systems.items():
            trained_with = self.trained_with.get(system.agent, environment)
            numbers.append(paper_number(system.method, environment, trained_with, datasets, metric))
        return numbers


def _percent_text(rate: Rate | None, n: int, best: float) -> str:
    """A rate in percent with its interval. A rate over fewer than `n` questions shows its own number."""
    if rate is None:
        return UNKNOWN
    mean = f"{100 * rate.mean:.1f}"
    if rate.mean > best - 1e-12:
        mean = f"**{mean}**"
    notes = []
    if rate.n != n:
        notes.append(f"n {rate.n}")
    if rate.errors:
        notes.append(f"{rate.errors} errors")
    missing = f" ({', '.join(notes)})" if notes else ""
    return f"{mean} {bounds_text(100 * rate.low, 100 * rate.high, '.1f')}{missing}"
