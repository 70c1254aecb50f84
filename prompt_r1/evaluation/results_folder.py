"""The results in an evaluation folder.

tables.md       every system and dataset, and the paper's Tables 2 to 5
results.json    means, intervals and costs of each system
"""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from prompt_r1.evaluation.predictions import AMOUNTS, System, short_names
from prompt_r1.evaluation.scores import Results
from prompt_r1.evaluation.statistics import bounds_text, mean_interval
from prompt_r1.evaluation.tables import paper_tables
from prompt_r1.programs.files import replace_file
from prompt_r1.programs.tables import markdown_table, text_table

TABLES, RESULTS = "tables.md", "results.json"
COUNTED = ("format", "turns", *AMOUNTS)
EXTRACTION = (
    "*EM read*: a gold answer equals the answer as it stands, or what a rule reads in it, which is the same "
    "rule for all methods (`prompt_r1/evaluation/extraction.py`)."
)


def write_results(folder: Path, results: Results, trained_with: Mapping[str, str]) -> str:
    """Write tables.md and results.json; returns a table for the terminal."""
    names = short_names(results.systems)
    found = {name: means_of(results, system, list(results.kinds)) for system, name in names.items()}
    replace_file(folder / RESULTS, (json.dumps(found, indent=1) + "\n").encode())
    notes = [EXTRACTION]
    if "text" in results.kinds.values() and "ssim" not in results.labels:
        notes.append("SSim was not measured: `--ssim-model DIR` names its encoder.")
    parts = [results_table(results), *notes, *paper_tables(results, trained_with)]
    replace_file(folder / TABLES, ("\n\n".join(parts) + "\n").encode())
    return _printed(results, found)


def _printed(results: Results, found: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each system without empty columns; only the first metric has its interval."""
    rows = [[name, *_cells(results, means)] for name, means in found.items()]
    rows = [[*row[:4], *(cell.partition(" [")[0] for cell in row[4:])] for row in rows]
    columns = zip(["method", *_header(results)], *rows, strict=True)
    header, *shown = zip(*(one for one in columns if one[0] == "n" or {*one[1:]} - {"–", "0"}), strict=True)
    return text_table(header, shown)


def means_of(results: Results, system: System, datasets: Sequence[str]) -> dict[str, Any]:
    """n, errors and the mean of everything measured over the questions of some datasets.

    Metrics have a 95 % interval, except one of too few questions. Failed calls are `errors`, and in no mean.
    """
    own = results.predictions(system, datasets)
    answered = [one for one in own if not one.error]
    questions = {(one.question.dataset, one.question.id) for one in answered}
    means: dict[str, Any] = {"n": len(questions), "errors": len(own) - len(answered)}
    for metric in results.labels:
        if scores := [score for name in datasets for score in results.scores(system, name, metric)]:
            means[metric] = fmean(scores)
            low, high = mean_interval(scores)
            if isfinite(high):
                means |= {f"{metric}_low": low, f"{metric}_high": high}
    for name in COUNTED:
        values = [getattr(one.spent if name in AMOUNTS else one, name) for one in answered]
        known = [value for value in values if value is not None]
        if known:
            means[name] = fmean(known)
    return means


def results_table(results: Results) -> str:
    """A Markdown table: a row for each system and dataset, then one for all datasets of the system."""
    names, rows = short_names(results.systems), []
    for system in results.systems:
        datasets = [dataset for dataset in results.kinds if (system, dataset) in results.groups]
        parts = {dataset: [dataset] for dataset in datasets} | ({"**all**": datasets} if datasets[1:] else {})
        for label, part in parts.items():
            rows.append([names[system], label, *_cells(results, means_of(results, system, part))])
    return markdown_table(["method", "dataset", *_header(results)], rows, left=2)


def _header(results: Results) -> list[str]:
    return ["n", "errors", *results.labels.values(), "format", "turns", "calls", "tokens", "$"]


def _cells(results: Results, means: Mapping[str, Any]) -> list[str]:
    """The cells below `_header`."""
    cells = [str(means["n"]), str(means["errors"])]
    for metric in results.labels:
        low, high = (means.get(f"{metric}_{end}", float("inf")) for end in ("low", "high"))
        interval = bounds_text(low, high, ".2f")
        cells.append(f"{means[metric]:.3f} {interval}" if metric in means else "–")
    cells += [f"{means[name]:.2f}" if name in means else "–" for name in ("format", "turns", "calls")]
    tokens = means.get("tokens_in", 0) + means.get("tokens_out", 0)
    return [*cells, f"{tokens:,.0f}", f"{means.get('usd', 0):.2g}"]
