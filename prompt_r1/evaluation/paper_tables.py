"""The paper's Tables 2 to 5, from scored predictions: rows are datasets and metrics, columns systems.

Tables 2, 3    results on the trained datasets and out of distribution, with the ablations of Table 4
Table 5        transfer: agents by the environment of their training, with each environment
"""

from collections.abc import Callable, Mapping, Sequence

from prompt_r1.cli.tables import markdown_table
from prompt_r1.evaluation import paper_numbers
from prompt_r1.evaluation.aggregate import LABELS, REPORTED_METRICS, Rate, Results
from prompt_r1.evaluation.predictions import System, short_names
from prompt_r1.metrics.statistics import bounds_text
from prompt_r1.terminal import printable_line

GPT_4O_MINI = "GPT-4o-mini"  # the environment of the paper's Tables 2 to 4
COLUMNS = {  # method, and its environment in the paper ("": any) → the paper's column in Tables 2 to 4
    ("direct", "Qwen3-4B"): "Qwen3-4B",
    ("direct", GPT_4O_MINI): "GPT-4o-mini",
    ("sft", ""): "SFT (Qwen3-4B)",
    ("cot", "Qwen3-4B"): "CoT (Qwen3-4B)",
    ("cot", GPT_4O_MINI): "CoT (GPT-4o-mini)",
    ("grpo-only", ""): "GRPO (Qwen3-4B)",
    ("opro", GPT_4O_MINI): "OPRO",
    ("textgrad", GPT_4O_MINI): "TextGrad",
    ("gepa", GPT_4O_MINI): "GEPA",
    ("agent-only", GPT_4O_MINI): "w/o Env.",
    ("untrained", GPT_4O_MINI): "w/o R.L.",
    ("prompt-r1", GPT_4O_MINI): "Prompt-R1",
}
ENVIRONMENTS = {  # part of a name → the paper's name
    "4o-mini": GPT_4O_MINI,
    "oss-20b": "GPT-OSS-20B",
    "qwen3-4b": "Qwen3-4B",
}
FULL = "prompt-r1"  # the method that the others are compared with
AVERAGE = "Average"

PaperNumber = Callable[[System, str, str], float | None]
"""System, dataset (or AVERAGE) and metric → the paper's number in percent."""


def paper_tables(results: Results, trained_with: Mapping[str, str]) -> list[str]:
    """The tables that the predictions can fill. `trained_with`: agent → the environment of its training."""
    environments = list(dict.fromkeys(system.environment for system in results.systems if system.environment))
    held_out = [
        name for name in results.kinds if name in paper_numbers.OUT_OF_DISTRIBUTION or name.endswith("_ood")
    ]
    trained = [name for name in results.kinds if name not in held_out]
    tables = []
    for environment in environments or [""]:
        systems = [system for system in results.systems if system.environment in (environment, "")]
        where = f", environment {environment}" if environment else ""
        for title, datasets in (("2: results", trained), ("3: results out of distribution", held_out)):
            if datasets:
                number = _results_number(environment, datasets, trained_with)
                tables.append(_table(f"Table {title}{where}", systems, results, datasets, number))
    full = [system for system in results.systems if system.method == FULL]
    if len(full) > 1:
        alone = [system for system in results.systems if system.method == "direct"]
        homes = [f"{agent} was trained with {home}" for agent, home in trained_with.items()]
        title = f"Table 5: transfer between environments ({', '.join(homes)})"
        number = _transfer_number(trained_with)
        tables.append(_table(title, [*alone, *full], results, list(results.kinds), number))
    return tables


def _results_number(
    environment: str, datasets: Sequence[str], trained_with: Mapping[str, str]
) -> PaperNumber:
    """The numbers of Tables 2 to 4. Those of the averages only for all datasets of a table."""
    tables = (paper_numbers.TRAINED, paper_numbers.OUT_OF_DISTRIBUTION)
    averaged = next((table for table in tables if set(table) == set(datasets)), ())

    def number(system: System, dataset: str, metric: str) -> float | None:
        column = COLUMNS.get((system.method, paper_name(environment))) or COLUMNS.get((system.method, ""))
        if column is None or trained_with.get(system.agent, environment) != environment:
            return None
        return paper_numbers.main_result(column, averaged if dataset == AVERAGE else [dataset], metric)

    return number


def _transfer_number(trained_with: Mapping[str, str]) -> PaperNumber:
    """The numbers of Table 5."""

    def number(system: System, dataset: str, metric: str) -> float | None:
        home = trained_with.get(system.agent, "unknown") if system.agent else ""
        return paper_numbers.transfer(paper_name(home), paper_name(system.environment), dataset, metric)

    return number


def _table(
    title: str,
    systems: Sequence[System],
    results: Results,
    datasets: Sequence[str],
    paper_number: PaperNumber,
) -> str:
    """A row for each dataset and metric, then averages; below each row the paper's numbers, if it has any."""
    wanted = [(name, metric) for name in datasets for metric in REPORTED_METRICS[results.kinds[name]]]
    if len(datasets) > 1:
        wanted += [(AVERAGE, metric) for metric in LABELS]
    rows = []
    for name, metric in wanted:
        averaged = datasets if name == AVERAGE else [name]
        rates = {system: results.average(system, averaged, metric) for system in systems}
        found = [rate for rate in rates.values() if rate is not None]
        if not found:
            continue
        n, best = max(rate.n for rate in found), max(rate.mean for rate in found)
        rows.append([f"{name} (n = {n})", LABELS[metric], *(_cell(rate, n, best) for rate in rates.values())])
        papers = [paper_number(system, name, metric) for system in systems]
        if any(number is not None for number in papers):
            shown = ("" if number is None else f"{number:.2f}" for number in papers)
            rows.append(["", f"{LABELS[metric]}, paper", *shown])
    names = short_names(systems)
    cells = markdown_table(["dataset", "metric", *(names[system] for system in systems)], rows, left=2)
    return f"### {printable_line(title)}\n\n{cells}"


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


def paper_name(environment: str) -> str:
    """The paper's name of an environment; other environments, also several at once, keep their names."""
    if "," in environment:
        return environment
    return next((name for part, name in ENVIRONMENTS.items() if part in environment.lower()), environment)
