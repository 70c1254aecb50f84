"""The paper's Tables 2 to 5, from scored predictions: rows are datasets and metrics, columns systems.

Tables 2, 3    results on the trained datasets and out of distribution, with the ablations of Table 4
Table 5        transfer: agents by the environment of their training, with each environment
"""

from collections.abc import Mapping, Sequence

from prompt_r1.data.datasets import OUT_OF_DISTRIBUTION, TRAINED
from prompt_r1.evaluation.paper_numbers import REPORTED_METRICS, paper_number
from prompt_r1.evaluation.predictions import System, short_names
from prompt_r1.evaluation.scores import LABELS, Rate, Results
from prompt_r1.evaluation.statistics import bounds_text
from prompt_r1.miniworld.world import OOD_KINDS
from prompt_r1.programs.tables import markdown_table
from prompt_r1.programs.terminal import printable_line


def paper_tables(results: Results, trained_with: Mapping[str, str]) -> list[str]:
    """The tables that the predictions can fill. `trained_with`: agent → the environment of its training."""
    environments = list(dict.fromkeys(system.environment for system in results.systems if system.environment))
    held_out = [name for name in results.kinds if name in (*OUT_OF_DISTRIBUTION, *OOD_KINDS)]
    trained = [name for name in results.kinds if name not in held_out]
    tables = []
    for environment in environments or [""]:
        # Systems without an environment are in the tables of each.
        systems = {
            system: environment for system in results.systems if system.environment in (environment, "")
        }
        where = f", environment {environment}" if environment else ""
        for title, datasets in (("2: results", trained), ("3: results out of distribution", held_out)):
            if datasets:
                tables.append(_table(f"Table {title}{where}", systems, results, datasets, trained_with))
    full = [system for system in results.systems if system.method == "prompt-r1"]
    if len(full) > 1:
        alone = [system for system in results.systems if system.method == "direct"]
        homes = [f"{agent} was trained with {home}" for agent, home in trained_with.items()]
        title = f"Table 5: transfer between environments ({', '.join(homes)})"
        systems = {system: system.environment for system in (*alone, *full)}
        tables.append(_table(title, systems, results, list(results.kinds), trained_with))
    return tables


def _table(
    title: str,
    systems: Mapping[System, str],
    results: Results,
    datasets: Sequence[str],
    trained_with: Mapping[str, str],
) -> str:
    """A row for each dataset and metric, then averages; below each row the paper's numbers, if it has any.

    `systems`: system → the environment whose numbers of the paper it is compared with.
    """
    wanted = [([name], metric) for name in datasets for metric in REPORTED_METRICS[results.kinds[name]]]
    if len(datasets) > 1:
        wanted += [(list(datasets), metric) for metric in LABELS]
    # The paper's averages are over all datasets of a table.
    comparable = set(datasets) in (set(TRAINED), set(OUT_OF_DISTRIBUTION))
    rows = []
    for names, metric in wanted:
        rates = {system: results.average(system, names, metric) for system in systems}
        found = [rate for rate in rates.values() if rate is not None]
        if not found and (len(names) > 1 or metric not in results.labels):
            continue  # not reported, or not measured
        n = max((rate.n for rate in found), default=0)
        best = max((rate.mean for rate in found), default=0.0)
        label = names[0] if len(names) == 1 else "Average"
        cells = [_cell(rate, n, best) for rate in rates.values()]
        rows.append([f"{label} (n = {n})", LABELS[metric], *cells])
        papers = [
            paper_number(system.method, where, trained_with.get(system.agent, where), names, metric)
            for system, where in systems.items()
            if len(names) == 1 or comparable
        ]
        if any(papers):
            rows.append(["", f"{LABELS[metric]}, paper", *papers])
    columns = short_names(systems).values()
    table = markdown_table(["dataset", "metric", *columns], rows, left=2)
    return f"### {printable_line(title)}\n\n{table}"


def _cell(rate: Rate | None, n: int, best: float) -> str:
    """A rate in percent with its interval; one over fewer than `n` questions with its own number."""
    if rate is None:
        return "–"
    mean = f"{100 * rate.mean:.1f}"
    parts = [f"n {rate.n}"] if rate.n != n else []
    parts += [f"{rate.errors} errors"] if rate.errors else []
    missing = f" ({', '.join(parts)})" if parts else ""
    shown = f"**{mean}**" if rate.mean > best - 1e-12 else mean
    return f"{shown} {bounds_text(100 * rate.low, 100 * rate.high, '.1f')}{missing}"
