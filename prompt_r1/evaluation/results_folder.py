"""The files of an evaluation folder besides the predictions.

results.md, results.json    every system and dataset: means with intervals, costs
tables.md, tableN.csv/.tex  the paper's Tables 2 to 5; cells.csv has every rate with its interval
comparisons.md              the full method against each other one, by dataset and pooled
cost.svg                    quality against calls (or dollars) per question
preparation.json            what preparing each method cost
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.functions import Metric
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import OWN, Rate, Results, Similarity, score_predictions
from prompt_r1.evaluation.comparison import (
    Comparison,
    check_pairs,
    compare_systems,
    comparison_table,
    with_holm,
)
from prompt_r1.evaluation.paper_tables import FULL, costs, paper_tables
from prompt_r1.evaluation.predictions import Prediction, System, read_predictions, systems_of
from prompt_r1.evaluation.printed import printed_comparisons, printed_pair, printed_results
from prompt_r1.evaluation.tables import rates_to_csv, to_csv, to_latex, to_markdown
from prompt_r1.metrics.text import Rules
from prompt_r1.report.svg import Plot, Point, Series, svg
from prompt_r1.terminal import printable_line


@dataclass(frozen=True)
class PairedComparison:
    """The full method against another one: by dataset, then pooled if there are several datasets."""

    full: System
    other: System
    comparisons: Sequence[Comparison]


def write_results(
    folder: Path,
    results: Results,
    trained_with: Mapping[str, str],
    *,
    notes: Sequence[str] = (),
) -> str:
    """Write the files above, in place of those of an earlier evaluation, with `notes` below the tables.

    Returns the text to print: a row for each system, and the pooled comparisons, fitted to the terminal.
    """
    paper, comparisons = paper_tables(results, trained_with), paired_comparisons(results)
    notes = [printable_line(note) for note in notes]
    result_list = "\n\n".join([results_table(results), *notes])
    pooled = pooled_comparisons(comparisons)
    files = {
        "results.md": result_list,
        "results.json": json.dumps(results_by_system(results), indent=1),
        "tables.md": "\n\n".join([*map(to_markdown, paper), *notes]),
        "cells.csv": rates_to_csv(paper),
        "comparisons.md": "\n\n".join([*pooled, *map(comparison_by_dataset, comparisons)]),
    }
    for table in paper:
        name = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in table.name)
        files |= {f"{name}.csv": to_csv(table), f"{name}.tex": to_latex(table)}
    for name, content in files.items():
        (folder / name).write_text(content.rstrip("\n") + "\n", "utf-8")
    # Drawn last: the answers are paid for, and an error in the plot must not cost their tables.
    (folder / "cost.svg").write_text(svg(quality_against_cost(results)), "utf-8")
    shown = printed_results(results, system_names(results.systems), results_by_system(results))
    return "\n\n".join([shown, *(printed_comparisons(*one) for one in pooled_by_full(comparisons).items())])


def note_preparation(folder: Path, system: System, spent: Mapping[str, float]) -> None:
    """Add the cost of preparing a system to preparation.json, unless it was free. Replaces a damaged file."""
    if not any(spent.values()):
        return
    path = folder / "preparation.json"
    try:
        noted = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (ValueError, RecursionError):
        noted = {}
    if not isinstance(noted, dict):
        noted = {}
    noted[str(system)] = dict(spent)
    path.write_text(json.dumps(noted, indent=1) + "\n", "utf-8")


def results_table(results: Results) -> str:
    """A Markdown table: a row for each system and dataset, then one for all datasets of the system."""
    rows = []
    for system, name in system_names(results.systems).items():
        datasets = [dataset for dataset in results.kinds if (system, dataset) in results.groups]
        rows += [[name, dataset, *_result_cells(results, system, [dataset])] for dataset in datasets]
        if len(datasets) > 1:
            rows.append([f"**{name}**", "**all**", *_result_cells(results, system, datasets)])
    header = ["method", "dataset", "n", "errors", *results.labels.values()]
    header += ["format", "turns", "calls", "tokens", "$"]
    return markdown_table(header, rows, left=2)


def _result_cells(results: Results, system: System, datasets: Sequence[str]) -> list[str]:
    means = mean_values(results, system, datasets)
    cells = [str(means["n"]), str(means["errors"])]
    cells += [_rate_text(results.pooled(system, datasets, metric)) for metric in results.labels]
    cells += [f"{means[name]:.2f}" if name in means else "–" for name in ("format", "turns", "calls")]
    tokens = means.get("tokens_in", 0.0) + means.get("tokens_out", 0.0)
    return [*cells, f"{tokens:,.0f}", f"{means.get('usd', 0.0):.2g}"]


def _rate_text(rate: Rate | None) -> str:
    return "–" if rate is None else f"{rate.mean:.3f} [{rate.low:.2f}, {rate.high:.2f}]"


def results_by_system(results: Results) -> dict[str, dict[str, float]]:
    """For each system n, errors and the means over the questions of all datasets."""
    names = system_names(results.systems)
    return {name: mean_values(results, system, list(results.kinds)) for system, name in names.items()}


def mean_values(results: Results, system: System, datasets: Sequence[str]) -> dict[str, float]:
    """The mean of every measured value; failed calls are counted as `errors` and left out of the means."""
    answered = [one for one in results.predictions(system, datasets) if not one.error]
    questions = {(one.question.dataset, one.question.id) for one in answered}
    means: dict[str, float] = {"n": len(questions), "errors": results.errors(system, datasets)}
    for metric in ("em", "sm", "f1", "ssim", "math", OWN):
        values = [one.metrics[metric] for one in answered if metric in one.metrics]
        if values:
            means[metric] = mean(values)
    for name in ("reward", "format", "turns", "calls", "tokens_in", "tokens_out", "usd"):
        values = [float(getattr(one, name)) for one in answered if getattr(one, name) is not None]
        if values:
            means[name] = mean(values)
    return means


def system_names(systems: Sequence[System]) -> dict[System, str]:
    """The method of each system, with its environment and agent if the method has several."""
    names = {}
    for system in systems:
        same_method = [other for other in systems if other.method == system.method]
        parts = []
        if len({other.environment for other in same_method}) > 1:
            parts.append(system.environment)
        if len({other.agent for other in same_method}) > 1:
            parts.append(system.agent)
        names[system] = f"{system.method} ({', '.join(parts)})" if parts else system.method
    return names


def paired_comparisons(results: Results) -> list[PairedComparison]:
    """The full method against each other system of its environment."""
    found = []
    for full in results.systems:
        if full.method != FULL:
            continue
        for other in results.systems:
            if other.method == FULL or other.environment not in (full.environment, ""):
                continue
            comparisons = compare_systems((results, full), (results, other))
            if comparisons:
                found.append(PairedComparison(full, other, comparisons))
    return found


def pooled_by_full(pairs: Sequence[PairedComparison]) -> dict[System, list[Comparison]]:
    """For each full system its pooled comparison with each other one; Holm's correction over them."""
    found = {}
    for full in dict.fromkeys(pair.full for pair in pairs):
        rows = [replace(pair.comparisons[-1], dataset=str(pair.other)) for pair in pairs if pair.full == full]
        found[full] = with_holm(rows)
    return found


def pooled_comparisons(pairs: Sequence[PairedComparison]) -> list[str]:
    """Markdown: for each full system a row for each other one."""
    parts = []
    for full, rows in pooled_by_full(pairs).items():
        table = comparison_table(rows, "first", "second", row_heading="second")
        parts.append(f"### {full} (first) against the others (second), all datasets\n\n{table}")
    return parts


def comparison_by_dataset(pair: PairedComparison) -> str:
    """Markdown: two systems, with a row for each dataset."""
    table = comparison_table(pair.comparisons, "first", "second")
    return f"### {pair.full} (first) against {pair.other} (second)\n\n{table}"


def compare_files(
    first: str,
    second: str,
    *,
    rules: Rules = "strict",
    similarity: Similarity | None = None,
    own: Metric | None = None,
) -> str:
    """Two systems, given as FILE or FILE:METHOD[:ENV[:AGENT]], compared by every metric: text for a terminal.

    Raises UsageError if a name does not select exactly one system, or if the questions differ.
    """
    predictions = [_select(first), _select(second)]
    check_pairs(predictions[0], predictions[1], names=(first, second))
    sides = [
        (score_predictions(side, rules=rules, similarity=similarity, own=own), side[0].system)
        for side in predictions
    ]
    parts = [f"A: {sides[0][1]}\nB: {sides[1][1]}"]
    for metric, label in sides[0][0].labels.items():
        comparisons = compare_systems(sides[0], sides[1], metric=metric)
        if comparisons:
            parts.append(printed_pair(comparisons, label))
    parts.append(printed_pair(compare_systems(sides[0], sides[1])[-1:], "main metrics"))
    parts.append(
        "Rates in percent. p of each dataset with Holm's correction: McNemar's test where\n"
        "answers are right or wrong, otherwise a sign-flip test."
    )
    return "\n\n".join(parts)


def _select(text: str) -> list[Prediction]:
    """The predictions of the system that FILE or FILE:METHOD[:ENV[:AGENT]] names."""
    if Path(text).exists():
        name, wanted = text, ""
    else:
        name, _, wanted = text.partition(":")
    predictions = read_predictions(Path(name))
    systems = systems_of(predictions)
    chosen = [system for system in systems if not wanted or f"{selector(system)}:".startswith(f"{wanted}:")]
    if len(chosen) != 1:
        choices = ", ".join(f"{name}:{selector(system)}" for system in systems)
        raise UsageError(f"--compare {text} names {len(chosen)} systems; choose one of {choices}")
    found = [one for one in predictions if one.system == chosen[0]]
    newest = list(dict.fromkeys(one.setting for one in found))[-1]
    return [one for one in found if one.setting == newest]


def selector(system: System) -> str:
    """The name of a system for --compare."""
    return ":".join((system.method, system.environment, system.agent)).rstrip(":")


def quality_against_cost(results: Results) -> Plot:
    """A point for each system: the mean of the datasets' main metrics, and calls or dollars per question."""
    datasets, series = list(results.kinds), []
    spent = {system: costs(results, system, datasets) for system in results.systems}
    paid = any(cost["$ / 1,000 questions"] for cost in spent.values() if cost)
    unit = "$ / 1,000 questions" if paid else "calls / question"
    for system, name in system_names(results.systems).items():
        rate = results.main_average(system, datasets)
        if rate is not None:
            point = Point(spent[system][unit], rate.mean, rate.low, rate.high, rate.n)
            series.append(Series(name, [point]))
    quality = "EM (texts: F1), mean of the datasets"
    return Plot("Quality against cost", unit, quality, series, names_at_points=True)
