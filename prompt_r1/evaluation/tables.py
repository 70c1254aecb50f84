"""The tables of an evaluation, from scored predictions.

There are three forms:

    terminal_table    a row for each system
    datasets_table    a row for each system and dataset
    paper_tables      the paper's Tables 2, 3 and 5: a row for each dataset and metric, a column for each
                      system. The ablations of the paper's Table 4 are columns of Tables 2 and 3
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_r1.data.datasets import OUT_OF_DISTRIBUTION, TRAINED
from prompt_r1.evaluation.intervals import bounds_text
from prompt_r1.evaluation.paper_numbers import paper_number
from prompt_r1.evaluation.predictions import System, short_names
from prompt_r1.evaluation.scores import LABELS, METRICS_OF_KIND, Means, Rate, Results, micro_means
from prompt_r1.miniworld.questions import OOD_KINDS
from prompt_r1.programs.files import replace_file
from prompt_r1.programs.tables import markdown_table, text_table
from prompt_r1.programs.text import printable_line

TABLES, RESULTS = "tables.md", "results.json"  # files in the folder of an evaluation
UNKNOWN = "–"
WIDTH = 80  # columns of the table for the terminal
SPARE_COLUMNS = ("tokens", "turns", "format")  # The first is left out first.


def write_results(folder: Path, results: Results, trained_with: Mapping[str, str]) -> None:
    """Write tables.md (all tables but the terminal's) and results.json (means, intervals, costs).

    `trained_with`: agent → the environment of its training.
    """
    means = {}
    for system, name in short_names(results.systems).items():
        means[name] = micro_means(results, system, list(results.kinds)).as_json()
    replace_file(folder / RESULTS, (json.dumps(means, indent=1) + "\n").encode())

    parts = [datasets_table(results)]
    if "text" in results.kinds.values() and "ssim" not in results.labels:
        parts.append("SSim was not measured: `--ssim-model DIR` names its encoder.")
    parts += paper_tables(results, trained_with)
    replace_file(folder / TABLES, ("\n\n".join(parts) + "\n").encode())


def terminal_table(results: Results) -> str:
    """A row for each system, over all datasets.

    EM and a user's own metrics have intervals. Empty columns are left out. A table that is wider than WIDTH
    loses columns that `datasets_table` has too. If it is still too wide, numbers stand for environments and
    agents, which are named below the table.
    """
    columns = _terminal_columns(results)
    for spare in SPARE_COLUMNS:
        if _width(columns) > WIDTH:
            columns.pop(spare, None)
    names_below: list[str] = []
    if _width(columns) > WIDTH:
        columns["method"], names_below = _numbered(results.systems)
    rows = list(zip(*columns.values(), strict=True))
    return "\n".join([text_table(list(columns), rows), *names_below])


def _terminal_columns(results: Results) -> dict[str, list[str]]:
    """The columns of the table for the terminal, each with a cell for each system."""
    rows = [micro_means(results, system, list(results.kinds)) for system in results.systems]
    columns = {"method": list(short_names(results.systems).values()), "n": [str(row.n) for row in rows]}
    if any(row.errors for row in rows):
        columns["errors"] = [str(row.errors) for row in rows]
    for metric, label in results.labels.items():
        interval = metric == "em" or metric in results.own_metrics
        columns[label] = [_rate_text(row, metric, interval=interval) for row in rows]
    for name in ("format", "turns", "calls"):
        if any(name in row.counts for row in rows):
            columns[name] = [_count_text(row, name) for row in rows]
    if any(_tokens(row) for row in rows):
        columns["tokens"] = [_tokens_text(row) for row in rows]
    if any(row.counts.get("usd") for row in rows):
        columns["$"] = [_dollars_text(row) for row in rows]
    return columns


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


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    """The width of a table for the terminal, whose columns are two blanks apart."""
    widths = [max(len(cell) for cell in (name, *cells)) for name, cells in columns.items()]
    return sum(widths) + 2 * (len(widths) - 1)


def datasets_table(results: Results) -> str:
    """A Markdown table: a row for each system and dataset, then a row for all datasets of the system."""
    names = short_names(results.systems)
    rows = []
    for system in results.systems:
        datasets = [name for name in results.kinds if (system, name) in results.groups]
        for name in datasets:
            rows.append([names[system], name, *_cells(results, micro_means(results, system, [name]))])
        if len(datasets) > 1:
            rows.append([names[system], "**all**", *_cells(results, micro_means(results, system, datasets))])
    header = ["method", "dataset", "n", "errors", *results.labels.values()]
    header += ["format", "turns", "calls", "tokens", "$"]
    return markdown_table(header, rows, left=2)


def _cells(results: Results, means: Means) -> list[str]:
    """The cells of a row of `datasets_table`, from the column n on."""
    cells = [str(means.n), str(means.errors)]
    cells += [_rate_text(means, metric, interval=True) for metric in results.labels]
    cells += [_count_text(means, name) for name in ("format", "turns", "calls")]
    return [*cells, _tokens_text(means), _dollars_text(means)]


def _rate_text(means: Means, metric: str, *, interval: bool) -> str:
    rate = means.rates.get(metric)
    if rate is None:
        return UNKNOWN
    bounds = f" {bounds_text(rate.low, rate.high, '.2f')}" if interval else ""
    return f"{rate.mean:.3f}{bounds}"


def _count_text(means: Means, name: str) -> str:
    return f"{means.counts[name]:.2f}" if name in means.counts else UNKNOWN


def _tokens(means: Means) -> float:
    return means.counts.get("tokens_in", 0) + means.counts.get("tokens_out", 0)


def _tokens_text(means: Means) -> str:
    return f"{_tokens(means):,.0f}"


def _dollars_text(means: Means) -> str:
    return f"{means.counts.get('usd', 0):.2g}"


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
    # Each system has a column, which is compared with the paper's numbers for this environment.
    systems: Mapping[System, str]
    trained_with: Mapping[str, str]  # agent → environment

    def markdown(self, title: str, datasets: Sequence[str]) -> str:
        """A row for each dataset and metric, then the averages over the datasets."""
        rows = []
        for name in datasets:
            for metric in METRICS_OF_KIND[self.results.kinds[name]]:
                if metric in self.results.labels:
                    rows.append(self._row(name, metric, self._rates([name], metric)))
                    rows += self._paper_row([name], metric)
        if len(datasets) > 1:
            # The paper averages over all datasets of a table.
            comparable = set(datasets) in (set(TRAINED), set(OUT_OF_DISTRIBUTION))
            for metric in LABELS:
                rates = self._rates(datasets, metric)
                if not any(rates):
                    continue
                rows.append(self._row("Average", metric, rates))
                if comparable:
                    rows += self._paper_row(datasets, metric)
        names = short_names(self.systems)
        table = markdown_table(["dataset", "metric", *names.values()], rows, left=2)
        return f"### {printable_line(title)}\n\n{table}"

    def _rates(self, datasets: Sequence[str], metric: str) -> list[Rate | None]:
        return [self.results.macro_average(system, datasets, metric) for system in self.systems]

    def _row(self, label: str, metric: str, rates: Sequence[Rate | None]) -> list[str]:
        """A row with our rates in percent. The best is in bold."""
        measured = [rate for rate in rates if rate is not None]
        n = max((rate.n for rate in measured), default=0)
        best = max((rate.mean for rate in measured), default=0.0)
        return [f"{label} (n = {n})", LABELS[metric], *(_percent_text(rate, n, best) for rate in rates)]

    def _paper_row(self, datasets: Sequence[str], metric: str) -> list[list[str]]:
        """The row with the paper's numbers, in a list, which is empty if the paper has none."""
        numbers = []
        for system, environment in self.systems.items():
            trained_with = self.trained_with.get(system.agent, environment)
            numbers.append(paper_number(system.method, environment, trained_with, datasets, metric))
        return [["", f"{LABELS[metric]}, paper", *numbers]] if any(numbers) else []


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
