"""What an evaluation leaves in its folder: lists, the paper's tables, comparisons, the plot.

results.md, results.json    every system and dataset; means with intervals, costs
tables.md, tableN.csv/.tex  the paper's Tables 2 to 5; cells.csv has every number with its interval
comparisons.md              the full method against each other one: per dataset and pooled
cost.svg                    quality against calls (or dollars) a question
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import LABELS, Cell, Scores, Similarity, score_predictions
from prompt_r1.evaluation.comparison import Difference, check_pairs, compare, comparison_table
from prompt_r1.evaluation.cost_plot import Point, cost_plot
from prompt_r1.evaluation.paper_tables import FULL, costs, paper_tables
from prompt_r1.evaluation.predictions import Prediction, System, read_predictions, systems_of
from prompt_r1.evaluation.tables import comma_separated, every_cell, latex, markdown, markdown_row
from prompt_r1.metrics.statistics import holm
from prompt_r1.metrics.text import Rules

ALL = "**all**"


def write_results(folder: Path, scores: Scores, trained_with: Mapping[str, str], *, tables: bool) -> str:
    """Write the files above, in place of those of an earlier evaluation. Returns what is to be printed: the
    list of results, or the paper's tables, and the comparisons over all datasets.
    """
    filled, rivals = paper_tables(scores, trained_with), duels(scores)
    results, overall = results_list(scores), summaries(rivals)
    files = {
        "results.md": results,
        "results.json": json.dumps(results_object(scores), indent=1),
        "tables.md": "\n\n".join(map(markdown, filled)),
        "cells.csv": every_cell(filled),
        "comparisons.md": "\n\n".join([*overall, *details(rivals)]),
        "cost.svg": quality_against_cost(scores),
    }
    for table in filled:
        name = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in table.name)
        files |= {f"{name}.csv": comma_separated(table), f"{name}.tex": latex(table)}
    for name, content in files.items():
        (folder / name).write_text(content.rstrip("\n") + "\n", "utf-8")
    return "\n\n".join([files["tables.md"] if tables else results, *overall])


def note_preparation(folder: Path, system: System, spent: Mapping[str, float]) -> None:
    """Add what preparing a system cost to preparation.json, unless it cost nothing."""
    if not any(spent.values()):
        return
    path = folder / "preparation.json"
    noted = json.loads(path.read_text("utf-8")) if path.exists() else {}
    noted[str(system)] = dict(spent)
    path.write_text(json.dumps(noted, indent=1) + "\n", "utf-8")


def results_list(scores: Scores) -> str:
    """Markdown: a line for each system and dataset, then for all its datasets together."""
    lines = [
        "| method | dataset | n | errors | EM | SM | F1 | SSim | format | turns | calls | tokens | $ |",
        "|---|---|" + "---:|" * 11,
    ]
    names = shown_names(scores.systems)
    for system in scores.systems:
        datasets = [name for name in scores.kinds if (system, name) in scores.groups]
        lines += [_line(names[system], name, scores, system, [name]) for name in datasets]
        if len(datasets) > 1:
            lines.append(_line(f"**{names[system]}**", ALL, scores, system, datasets))
    return "\n".join(lines)


def results_object(scores: Scores) -> dict[str, dict[str, float]]:
    """System → n, errors, and the mean of each thing measured, over the questions of all datasets."""
    names = shown_names(scores.systems)
    return {names[system]: averages(scores, system, list(scores.kinds)) for system in scores.systems}


def averages(scores: Scores, system: System, datasets: Sequence[str]) -> dict[str, float]:
    """Plain means over the questions; failed calls are left out, and counted."""
    group = [one for name in datasets for one in scores.groups.get((system, name), [])]
    ended = [one for one in group if not one.prediction.error]
    asked = {(one.prediction.dataset, one.prediction.id) for one in ended}
    found: dict[str, float] = {"n": len(asked), "errors": len(group) - len(ended)}
    for metric in ("em", "sm", "f1", "ssim", "math"):
        values = [one.values[metric] for one in ended if metric in one.values]
        found |= {metric: mean(values)} if values else {}
    for name in ("reward", "format", "turns", "calls", "tokens_in", "tokens_out", "usd"):
        measured = [getattr(one.prediction, name) for one in ended]
        values = [float(value) for value in measured if value is not None]
        found |= {name: mean(values)} if values else {}
    return found


def shown_names(systems: Sequence[System]) -> dict[System, str]:
    """The method, with its environment or agent where the method comes with several."""
    names = {}
    for system in systems:
        rivals = [other for other in systems if other.method == system.method]
        parts = [
            getattr(system, part)
            for part in ("environment", "agent")
            if len({getattr(other, part) for other in rivals}) > 1
        ]
        names[system] = f"{system.method} ({', '.join(parts)})" if parts else system.method
    return names


Duels = Mapping[System, Mapping[System, Sequence[Difference]]]
"""Full system → rival → differences by dataset, the pooled one last."""


def duels(scores: Scores) -> Duels:
    """The full method against each other system of its environment."""
    found: dict[System, dict[System, Sequence[Difference]]] = {}
    for full in (system for system in scores.systems if system.method == FULL):
        for rival in scores.systems:
            same = rival.environment in (full.environment, "")
            differences = compare((scores, full), (scores, rival)) if same and rival.method != FULL else []
            if differences:
                found.setdefault(full, {})[rival] = differences
    return found


def summaries(found: Duels) -> list[str]:
    """Markdown: a line for each rival, over all datasets; Holm's correction over the rivals."""
    parts = []
    for full, rivals in found.items():
        pooled = [differences[-1] for differences in rivals.values()]
        corrected = holm([one.p for one in pooled])
        lines = [replace(one, dataset=str(rival), p_holm=p)
                 for rival, one, p in zip(rivals, pooled, corrected, strict=True)]  # fmt: skip
        table = comparison_table(lines, "first", "second").replace("dataset", "second", 1)
        parts.append(f"### {full} (first) against the others (second), all datasets\n\n{table}")
    return parts


def details(found: Duels) -> list[str]:
    """Markdown: each comparison by dataset."""
    return [
        f"### {full} (first) against {rival} (second)\n\n{comparison_table(differences, 'first', 'second')}"
        for full, rivals in found.items()
        for rival, differences in rivals.items()
    ]


def compare_files(
    first: str, second: str, *, rules: Rules = "strict", similarity: Similarity | None = None
) -> str:
    """Markdown: two systems, each FILE or FILE:METHOD[:ENV[:AGENT]], paired by question, by every metric.

    Raises UsageError when a name does not choose one system, or the questions are not the same.
    """
    sides = [_choose(text) for text in (first, second)]
    check_pairs(sides[0], sides[1], names=(first, second))
    scored = [(score_predictions(side, rules=rules, similarity=similarity), side[0].system) for side in sides]
    titles = [f"{label}: {system}" for label, (_, system) in zip("AB", scored, strict=True)]
    parts = ["\n".join(titles)]
    for metric in LABELS:
        differences = compare(scored[0], scored[1], metric=metric)
        if differences:
            parts.append(comparison_table(differences, "A", "B"))
    parts.append(comparison_table(compare(scored[0], scored[1])[-1:], "A", "B"))
    return "\n\n".join(parts)


def _choose(text: str) -> list[Prediction]:
    """The predictions of one system from FILE or FILE:METHOD[:ENV[:AGENT]]."""
    name, *wanted = text.split(":", 1) if not Path(text).exists() else [text]
    predictions = read_predictions(Path(name))
    systems = systems_of(predictions)
    chosen = [
        system for system in systems if not wanted or f"{selector(system)}:".startswith(f"{wanted[0]}:")
    ]
    if len(chosen) != 1:
        choices = ", ".join(f"{name}:{selector(system)}" for system in systems)
        raise UsageError(f"--compare {text} names {len(chosen)} systems; choose one of {choices}")
    [system] = chosen
    found = [one for one in predictions if one.system == system]
    settings = list(dict.fromkeys(one.setting for one in found))
    return [one for one in found if one.setting == settings[-1]]  # the newest, if a setting was changed


def selector(system: System) -> str:
    """How --compare names a system."""
    return ":".join((system.method, system.environment, system.agent)).rstrip(":")


def quality_against_cost(scores: Scores) -> str:
    """The plot: the mean of the kinds' main metrics over all datasets."""
    names, datasets, points = shown_names(scores.systems), list(scores.kinds), []
    spent = {system: costs(scores, system, datasets) for system in scores.systems}
    paid = any(cost["$ / 1,000 questions"] for cost in spent.values() if cost)
    label = "$ / 1,000 questions" if paid else "calls / question"
    for system in scores.systems:
        cell = scores.main(system, datasets)
        if cell is not None:
            cost = spent[system][label]
            points.append(Point(names[system], cost, cell.mean, cell.low, cell.high))
    quality = "EM (texts: F1), mean of the datasets, %"
    return cost_plot(points, cost_label=label, quality_label=quality)


def _line(label: str, title: str, scores: Scores, system: System, datasets: Sequence[str]) -> str:
    found = averages(scores, system, datasets)
    numbers = [_rate(scores.pooled(system, datasets, metric)) for metric in LABELS]
    tokens = found.get("tokens_in", 0.0) + found.get("tokens_out", 0.0)
    numbers += [f"{found[name]:.2f}" if name in found else "–" for name in ("format", "turns", "calls")]
    numbers += [f"{tokens:,.0f}", f"{found.get('usd', 0.0):.2g}"]
    return markdown_row([label, title, f"{found['n']}", f"{found['errors']}", *numbers])


def _rate(cell: Cell | None) -> str:
    return "–" if cell is None else f"{cell.mean:.3f} [{cell.low:.2f}, {cell.high:.2f}]"
