"""The tables of an evaluation, from scored predictions.

There are three forms:

    terminal_table    a row for each system
    datasets_table    a row for each system and dataset
    paper_tables      the paper's Tables 2, 3 and 5: a row for each dataset and metric, a column for each
                      system. The ablations of the paper's Table 4 are columns of Tables 2 and 3

The test after a training writes a `datasets_table` of fewer columns (after_training.py).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_r1.data.datasets import OUT_OF_DISTRIBUTION, TRAINED
from prompt_r1.evaluation.intervals import bounds_text
from prompt_r1.evaluation.paper_numbers import paper_number
from prompt_r1.evaluation.predictions import System, short_names
from prompt_r1.evaluation.scores import LABELS, Means, Rate, Results
from prompt_r1.miniworld.questions import OOD_KINDS
from prompt_r1.programs.files import replace_file
from prompt_r1.programs.tables import markdown_table, text_table
from prompt_r1.programs.text import printable_line

TABLES, RESULTS = "tables.md", "results.json"  # files in the folder of an evaluation
UNKNOWN = "–"
# The terminal does not show these columns of `datasets_table`, so that its lines have 80 characters.
NOT_ON_TERMINAL = ("format", "turns", "tokens")


def write_results(folder: Path, results: Results, trained_with: Mapping[str, str]) -> None:
    """Write tables.md (all tables but the terminal's) and results.json (means, intervals, costs).

    `trained_with`: agent → the environment of its training.
    """
    names = short_names(results.systems)
    means_of_systems = {names[system]: means.as_json() for system, means in results.means.items()}
    replace_file(folder / RESULTS, (json.dumps(means_of_systems, indent=1) + "\n").encode())

    parts = [datasets_table(results, lambda means: cells_of(means, results, with_interval=results.labels))]
    notes = notes_on_texts(results)
    if notes and "ssim" not in results.labels:
        notes.append("SSim was not measured: `--ssim-model DIR` names its encoder.")
    parts += notes
    parts += paper_tables(results, trained_with)
    replace_file(folder / TABLES, ("\n\n".join(parts) + "\n").encode())


def notes_on_texts(results: Results) -> list[str]:
    """A line about the mean EM over all questions, if free texts are among them.

    The paper's tables need none, because they report no EM of free texts.
    """
    questions = {result.prediction.question for group in results.groups.values() for result in group}
    texts = [question for question in questions if question.kind == "text"]
    if not texts:
        return []
    return [
        f"EM of a free text ({len(texts)} of the {len(questions)} questions) is 0 unless every word is right."
    ]


def cells_of(means: Means, results: Results, *, with_interval: Collection[str]) -> dict[str, str]:
    """A row of a table: label of the column → text. The metrics `with_interval` show their intervals."""
    cells = {"n": str(means.n), "errors": str(means.errors)}
    for metric, label in results.labels.items():
        cells[label] = rate_text(means.rates.get(metric), interval=metric in with_interval)
    for name in ("format", "turns", "calls"):
        cells[name] = f"{means.counts[name]:.2f}" if name in means.counts else UNKNOWN
    tokens = means.counts.get("tokens_in", 0) + means.counts.get("tokens_out", 0)
    cells["tokens"] = f"{tokens:,.0f}"
    cells["$"] = f"{means.counts.get('usd', 0):.2g}"
    return cells


def rate_text(rate: Rate | None, *, interval: bool) -> str:
    """A rate from 0 to 1, with or without its interval."""
    if rate is None:
        return UNKNOWN
    bounds = f" {bounds_text(rate.low, rate.high, '.2f')}" if interval else ""
    return f"{rate.mean:.3f}{bounds}"


def terminal_table(results: Results) -> str:
    """A row for each system, over all datasets.

    EM and a user's own metrics have intervals. Columns without any number but 0 are left out. If there are
    several systems of a method, they have numbers, and the lines below the table say what these stand for.
    The last line is about free texts, if there are any.
    """
    rows = []
    lines_below: list[str] = []
    own_metrics = [metric for metric in results.labels if metric not in LABELS]
    for system, name in short_names(results.systems).items():
        if name != system.method:
            number = len(lines_below) + 1
            lines_below.append(f"[{number}] {name}")
            name = f"{system.method} [{number}]"
        cells = cells_of(results.means[system], results, with_interval=["em", *own_metrics])
        rows.append({"method": name, **cells})
    labels = []
    for label in rows[0]:
        is_empty = all(row[label] in ("0", UNKNOWN) for row in rows)
        if label == "n" or not (is_empty or label in NOT_ON_TERMINAL):
            labels.append(label)
    table = text_table(labels, [[row[label] for label in labels] for row in rows])
    return "\n".join([table, *lines_below, *notes_on_texts(results)])


def datasets_table(results: Results, cells: Callable[[Means], Mapping[str, str]]) -> str:
    """A Markdown table: a row for each system and dataset, then a row for all datasets of the system.

    `cells` gives the cells of a row, by the labels of their columns.
    """
    rows = []
    for system, name in short_names(results.systems).items():
        datasets = [dataset for dataset in results.datasets if (system, dataset) in results.groups]
        for dataset in datasets:
            means = results.micro_means(system, [dataset])
            rows.append({"method": name, "dataset": dataset, **cells(means)})
        if len(datasets) > 1:
            rows.append({"method": name, "dataset": "**all**", **cells(results.means[system])})
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows], left=2)


def paper_tables(results: Results, trained_with: Mapping[str, str]) -> list[str]:
    """The tables that the predictions can fill. `trained_with`: agent → the environment of its training."""
    out_of_distribution = [name for name in results.datasets if name in (*OUT_OF_DISTRIBUTION, *OOD_KINDS)]
    trained = [name for name in results.datasets if name not in out_of_distribution]
    environments = list(dict.fromkeys(system.environment for system in results.systems if system.environment))
    tables = []
    for environment in environments or [""]:
        # A system without an environment, such as sft, is in the tables of every environment.
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
        columns = {system: system.environment for system in [*direct, *full]}
        table = PaperTable(results, columns, trained_with)
        homes = ", ".join(f"{agent} was trained with {home}" for agent, home in trained_with.items())
        title = f"Table 5: transfer between environments ({homes})"
        tables.append(table.markdown(title, results.datasets))
    return tables


@dataclass(frozen=True)
class PaperTable:
    """A table in the paper's form, with the paper's numbers below ours."""

    results: Results
    columns: Mapping[System, str]  # each system, and the environment of its numbers in the paper
    trained_with: Mapping[str, str]  # agent → the environment of its training

    def markdown(self, title: str, datasets: Sequence[str]) -> str:
        """Rows for each dataset and metric, then for the averages over the datasets."""
        rows = []
        for name in datasets:
            for metric in self.results.reported_metrics(name):
                rows += self._rows(name, [name], metric)
        if len(datasets) > 1:
            for metric in LABELS:
                if any(self._rates(datasets, metric)):
                    rows += self._rows("Average", datasets, metric)
        names = short_names(self.columns)
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
        return [self.results.macro_average(system, datasets, metric) for system in self.columns]

    def _paper_numbers(self, datasets: Sequence[str], metric: str) -> list[str]:
        """The paper's number for each system, "" where it has none."""
        # The paper's averages are over all datasets of its Table 2 or 3.
        is_whole_table = set(datasets) in (set(TRAINED), set(OUT_OF_DISTRIBUTION))
        if len(datasets) > 1 and not is_whole_table:
            return []
        numbers = []
        for system, environment in self.columns.items():
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
    own_number = f" (n {rate.n})" if rate.n != n else ""
    return f"{mean} {bounds_text(100 * rate.low, 100 * rate.high, '.1f')}{own_number}"
