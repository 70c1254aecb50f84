"""The files of an evaluation folder besides the predictions.

results.md, results.json    every system and dataset: means with intervals, costs
tables.md                   the paper's Tables 2 to 5; each rate with its interval
comparisons.md              the full method against each other one, by dataset and pooled
preparation.json            what preparing each method cost
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import mean

from prompt_r1.cli.fitted_table import fitted_table
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.evaluation.aggregate import OWN, Rate, Results
from prompt_r1.evaluation.comparison import (
    Comparison,
    compare_systems,
    comparison_table,
    printed_comparisons,
    with_holm,
)
from prompt_r1.evaluation.paper_tables import FULL, paper_tables
from prompt_r1.evaluation.predictions import AMOUNTS, System, system_names
from prompt_r1.foreign import json_object
from prompt_r1.metrics.statistics import bounds_text
from prompt_r1.terminal import printable_line


def write_results(
    folder: Path, results: Results, trained_with: Mapping[str, str], *, notes: Sequence[str] = ()
) -> str:
    """Write the files above, in place of those of an earlier evaluation, with `notes` below the tables.

    Returns the text to print: a row for each system, and the pooled comparisons, fitted to the terminal.
    """
    paper, compared = paper_tables(results, trained_with), compare_with_full(results)
    pooled = {
        full: with_holm([replace(found[-1], dataset=str(other)) for other, found in against.items()])
        for full, against in compared.items()
    }
    notes = [printable_line(note) for note in notes]
    if results.lacks_similarity:
        notes.append("SSim was not measured: `--ssim-model DIR` names its encoder.")
    comparisons = [
        f"### {full} (first) against the others (second), all datasets\n\n"
        f"{comparison_table(rows, row_heading='second')}"
        for full, rows in pooled.items()
    ]
    for full, against in compared.items():
        for other, found in against.items():
            comparisons.append(f"### {full} (first) against {other} (second)\n\n{comparison_table(found)}")
    files = {
        "results.md": "\n\n".join([results_table(results), *notes]),
        "results.json": json.dumps(results_by_system(results), indent=1),
        "tables.md": "\n\n".join([*(table.markdown() for table in paper), *notes]),
        "comparisons.md": "\n\n".join(comparisons),
    }
    for name, content in files.items():
        (folder / name).write_text(content.rstrip("\n") + "\n", "utf-8")
    return "\n\n".join([printed_results(results), *(printed_comparisons(*one) for one in pooled.items())])


def note_preparation(folder: Path, system: System, spent: Mapping[str, float]) -> None:
    """Add the cost of preparing a system to preparation.json, unless it was free. Replaces a damaged file."""
    if not any(spent.values()):
        return
    path = folder / "preparation.json"
    noted = json_object(path.read_bytes()) if path.exists() else {}
    noted[str(system)] = dict(spent)
    path.write_text(json.dumps(noted, indent=1) + "\n", "utf-8")


def results_table(results: Results) -> str:
    """A Markdown table: a row for each system and dataset, then one for all datasets of the system."""
    header = ["method", "dataset", "n", "errors", *results.labels.values()]
    header += ["format", "turns", "calls", "tokens", "$"]
    rows = []
    for system, name in system_names(results.systems, {}).items():
        datasets = [dataset for dataset in results.kinds if (system, dataset) in results.groups]
        rows += [[name, dataset, *_cells(results, system, [dataset]).values()] for dataset in datasets]
        if len(datasets) > 1:
            rows.append([f"**{name}**", "**all**", *_cells(results, system, datasets).values()])
    return markdown_table(header, rows, left=2)


def printed_results(results: Results) -> str:
    """A row for each system, over all datasets, without the columns that nobody filled."""
    table = []
    for system, name in system_names(results.systems, {}).items():
        cells = {"method": name, **_cells(results, system, list(results.kinds))}
        for label in list(results.labels.values())[1:]:
            cells[label] = cells[label].partition(" [")[0]  # the interval of the first metric is enough
        table.append(cells)
    empty = ("–", "0")
    kept = [name for name in table[0] if name == "n" or any(row[name] not in empty for row in table)]
    rows = [[row[name] for name in kept] for row in table]
    return fitted_table(kept, rows, drop=["SM", "tokens", "turns", "format", "n", "F1", "SSim"])


def _cells(results: Results, system: System, datasets: Sequence[str]) -> dict[str, str]:
    """The cells of a system by column: its means over the questions of some datasets."""
    means = mean_values(results, system, datasets)
    cells = {"n": str(means["n"]), "errors": str(means["errors"])}
    for metric, label in results.labels.items():
        cells[label] = _rate_text(results.pooled(system, datasets, metric))
    for name in ("format", "turns", "calls"):
        cells[name] = f"{means[name]:.2f}" if name in means else "–"
    cells["tokens"] = f"{means.get('tokens_in', 0.0) + means.get('tokens_out', 0.0):,.0f}"
    return {**cells, "$": f"{means.get('usd', 0.0):.2g}"}


def _rate_text(rate: Rate | None) -> str:
    return "–" if rate is None else f"{rate.mean:.3f} {bounds_text(rate.low, rate.high, '.2f')}"


def results_by_system(results: Results) -> dict[str, dict[str, object]]:
    """For each system n, errors and the means over the questions of all datasets, with 95 % intervals.

    An interval of too few questions, which has no ends, is left out.
    """
    found: dict[str, dict[str, object]] = {}
    for system, name in system_names(results.systems, {}).items():
        parts = [system.method, system.environment, system.agent]
        found[name] = {"system": parts, **mean_values(results, system, list(results.kinds))}
        for metric in results.labels:
            rate = results.pooled(system, list(results.kinds), metric)
            if rate is not None and isfinite(rate.high):
                found[name] |= {metric: rate.mean, f"{metric}_low": rate.low, f"{metric}_high": rate.high}
    return found


def mean_values(results: Results, system: System, datasets: Sequence[str]) -> dict[str, float]:
    """The mean of every measured value; failed calls are counted as `errors` and left out of the means."""
    answered = [one for one in results.predictions(system, datasets) if not one.error]
    questions = {(one.question.dataset, one.question.id) for one in answered}
    means: dict[str, float] = {"n": len(questions), "errors": results.errors(system, datasets)}
    for metric in ("em", "sm", "f1", "ssim", "math", OWN):
        values = [one.metrics[metric] for one in answered if metric in one.metrics]
        if values:
            means[metric] = mean(values)
    for name in ("reward", "format", "turns"):
        values = [float(getattr(one, name)) for one in answered if getattr(one, name) is not None]
        if values:
            means[name] = mean(values)
    if answered:
        means |= {name: mean(float(getattr(one.spent, name)) for one in answered) for name in AMOUNTS}
    return means


def compare_with_full(results: Results) -> dict[System, dict[System, list[Comparison]]]:
    """The full method against each other system of its environment: by dataset, then pooled."""
    compared: dict[System, dict[System, list[Comparison]]] = {}
    for full in [system for system in results.systems if system.method == FULL]:
        for other in results.systems:
            if other.method != FULL and other.environment in (full.environment, ""):
                found = compare_systems((results, full), (results, other))
                if found:
                    compared.setdefault(full, {})[other] = found
    return compared
