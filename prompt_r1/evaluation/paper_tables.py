"""The paper's Tables 2 to 5 from scored predictions, with intervals and the paper's own numbers.

table2, table3    results on the trained datasets and out of distribution; one column per method
table4            ablations; one row each
table5            transfer: agents by the environment of their training, with each environment
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from prompt_r1.evaluation import paper_numbers
from prompt_r1.evaluation.aggregate import LABELS, REPORTED_METRICS, Results
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.tables import Entry, Label, Table

GPT_4O_MINI = "GPT-4o-mini"  # the environment of the paper's Tables 2 to 4
COLUMNS = {  # method, and its environment in the paper ("": none) → the paper's column in Tables 2 and 3
    ("direct", "Qwen3-4B"): "Qwen3-4B",
    ("direct", GPT_4O_MINI): "GPT-4o-mini",
    ("sft", ""): "SFT (Qwen3-4B)",
    ("cot", "Qwen3-4B"): "CoT (Qwen3-4B)",
    ("cot", GPT_4O_MINI): "CoT (GPT-4o-mini)",
    ("grpo-only", ""): "GRPO (Qwen3-4B)",
    ("opro", GPT_4O_MINI): "OPRO",
    ("textgrad", GPT_4O_MINI): "TextGrad",
    ("gepa", GPT_4O_MINI): "GEPA",
    ("prompt-r1", GPT_4O_MINI): "Prompt-R1",
}
AGENT_ALONE = ("Qwen3-4B", "CoT (Qwen3-4B)")  # the paper's columns of the untrained agent without environment
ABLATIONS = {  # method → the row in Table 4
    "agent-only": "w/o Env.",
    "untrained": "w/o R.L.",
    "direct": "w/o Agent",
    "prompt-r1": "Prompt-R1 (Full)",
}
ENVIRONMENTS = {
    "4o-mini": GPT_4O_MINI,
    "oss-20b": "GPT-OSS-20B",
    "qwen3-4b": "Qwen3-4B",
}  # part of a name → the paper's
FULL = "prompt-r1"  # the method that the others are compared with
AVERAGE = "Average"

PaperNumber = Callable[[System, str, str], float | None]
"""System, dataset (or AVERAGE) and metric → the paper's number in percent."""


@dataclass(frozen=True)
class _Measured:
    """A rate with its place: dataset and metric, and the system."""

    dataset: str
    metric: str
    label: Label
    system: System
    entry: Entry


def paper_tables(results: Results, trained_with: Mapping[str, str]) -> list[Table]:
    """The tables that the predictions can fill. `trained_with`: agent → the environment of its training."""
    environments = list(dict.fromkeys(system.environment for system in results.systems if system.environment))
    trained, held_out = split_datasets(results)
    tables = []
    for number, environment in enumerate(environments or [""]):
        systems = _systems_with(environment, results, trained_with)
        suffix = f"-{environment}" if number else ""
        where = f", environment {environment}" if environment else ""
        if trained:
            title = f"Table 2: results{where}"
            tables.append(_results_table(results, systems, environment, trained, f"table2{suffix}", title))
        if held_out:
            title = f"Table 3: results out of distribution{where}"
            tables.append(_results_table(results, systems, environment, held_out, f"table3{suffix}", title))
        methods = {system.method for system in systems}
        if FULL in methods and len(methods & set(ABLATIONS)) > 1:
            title = f"Table 4: ablations{where}"
            tables.append(_ablations_table(results, systems, environment, f"table4{suffix}", title))
    if len({system for system in results.systems if system.method == FULL}) > 1:
        tables.append(_transfer_table(results, trained_with))
    return tables


def split_datasets(results: Results) -> tuple[list[str], list[str]]:
    """The datasets of Table 2 (like those of the training) and of Table 3 (out of distribution)."""
    held_out = [
        name for name in results.kinds if name in paper_numbers.OUT_OF_DISTRIBUTION or name.endswith("_ood")
    ]
    return [name for name in results.kinds if name not in held_out], held_out


def costs(results: Results, system: System, datasets: Sequence[str]) -> dict[str, float]:
    """The mean cost of a question in the test, and the share of questions without an answer."""
    answered = [one for one in results.predictions(system, datasets) if not one.error]
    if not answered:
        return {}
    return {
        "calls / question": mean(one.calls for one in answered),
        "tokens / question": mean(one.tokens_in + one.tokens_out for one in answered),
        "$ / 1,000 questions": 1000 * mean(one.usd for one in answered),
        "no answer, %": 100 * mean(not one.answer for one in answered),
    }


def _results_table(
    results: Results,
    systems: Sequence[System],
    environment: str,
    datasets: Sequence[str],
    name: str,
    title: str,
) -> Table:
    """A row for each dataset and metric, then averages and costs; a column for each system.

    With the paper's environment, two more columns have its numbers of the untrained agent alone.
    """

    def number_of_column(column: str, dataset: str, metric: str) -> float | None:
        if dataset != AVERAGE:
            return paper_numbers.main_result(column, dataset, metric)
        for table in (paper_numbers.TRAINED, paper_numbers.OUT_OF_DISTRIBUTION):
            if set(table) == set(datasets):
                return paper_numbers.average(column, table, metric)
        return None

    def paper_number(system: System, dataset: str, metric: str) -> float | None:
        column = COLUMNS.get((system.method, paper_name(system.environment)), "")
        return number_of_column(column, dataset, metric)

    names = _names(systems, {})
    entries: dict[tuple[Label, Label], Entry] = {}
    measured = _measure(results, systems, datasets, paper_number)
    for one in measured:
        entries[one.label, (names[one.system],)] = one.entry
    if paper_name(environment) == GPT_4O_MINI:
        for one in measured:
            for column in AGENT_ALONE:
                number = number_of_column(column, one.dataset, one.metric)
                if number is not None:
                    entries[one.label, (f"{column}, paper",)] = Entry(paper=number)
    for system in systems:
        for label, number in costs(results, system, datasets).items():
            entries[(label, ""), (names[system],)] = Entry(number=number)
    return _table(name, title, ("dataset", "metric"), entries, results, datasets)


def _ablations_table(
    results: Results, systems: Sequence[System], environment: str, name: str, title: str
) -> Table:
    def paper_number(system: System, dataset: str, metric: str) -> float | None:
        if paper_name(environment) != GPT_4O_MINI:
            return None
        return paper_numbers.ablation(ABLATIONS[system.method], dataset, metric)

    chosen = [system for method in ABLATIONS for system in systems if system.method == method]
    labels = _names(chosen, ABLATIONS)
    return _table_by_system(name, title, labels, results, paper_number)


def _transfer_table(results: Results, trained_with: Mapping[str, str]) -> Table:
    """Each environment alone, then each agent with each environment."""

    def paper_number(system: System, dataset: str, metric: str) -> float | None:
        home = trained_with.get(system.agent, "unknown") if system.agent else ""
        return paper_numbers.transfer(paper_name(home), paper_name(system.environment), dataset, metric)

    def label(system: System) -> str:
        if system.method != FULL:
            return f"{system.environment} alone"
        home = trained_with.get(system.agent, "?")
        agent = f" ({system.agent})" if list(trained_with.values()).count(home) > 1 else ""
        return f"trained with {home}{agent}, tested with {system.environment}"

    chosen = [system for method in ("direct", FULL) for system in results.systems if system.method == method]
    labels = {system: label(system) for system in chosen}
    return _table_by_system("table5", "Table 5: transfer between environments", labels, results, paper_number)


def _table_by_system(
    name: str, title: str, labels: Mapping[System, str], results: Results, paper_number: PaperNumber
) -> Table:
    """A row for each system, a column for each dataset and metric."""
    datasets, systems = list(results.kinds), list(labels)
    measured = _measure(results, systems, datasets, paper_number)
    entries: dict[tuple[Label, Label], Entry] = {}
    for one in sorted(measured, key=lambda one: systems.index(one.system)):
        entries[(labels[one.system],), one.label] = one.entry
    return _table(name, title, ("",), entries, results, datasets)


def _measure(
    results: Results, systems: Sequence[System], datasets: Sequence[str], paper_number: PaperNumber
) -> list[_Measured]:
    """The rates by dataset and metric, then the averages; the best of the systems are marked."""
    wanted = [(name, metric) for name in datasets for metric in REPORTED_METRICS[results.kinds[name]]]
    if len(datasets) > 1:
        wanted += [(AVERAGE, metric) for metric in LABELS]
    measured = []
    for name, metric in wanted:
        rates = {}
        for system in systems:
            if name == AVERAGE:
                rates[system] = results.average(system, datasets, metric)
            else:
                rates[system] = results.rate(system, name, metric)
        found = [rate for rate in rates.values() if rate is not None]
        if not found:
            continue
        n, best = max(rate.n for rate in found), max(rate.mean for rate in found)
        label = (f"{name} (n = {n})", LABELS[metric])
        for system, rate in rates.items():
            is_best = rate is not None and rate.mean > best - 1e-12
            paper = paper_number(system, name, metric)
            entry = Entry(rate, best=is_best, paper=paper, usual_n=n)
            measured.append(_Measured(name, metric, label, system, entry))
    return measured


def _systems_with(environment: str, results: Results, trained_with: Mapping[str, str]) -> list[System]:
    """The systems with this environment or without any.

    If agents were trained with it, agents that were trained with another one are left out.
    """
    systems = [system for system in results.systems if system.environment in (environment, "")]
    at_home = [system for system in systems if trained_with.get(system.agent) == environment]
    if not at_home:
        return systems
    return [system for system in systems if system.agent not in trained_with or system in at_home]


def _names(systems: Sequence[System], renamed: Mapping[str, str]) -> dict[System, str]:
    """The method of each system, with its agent if a method has several."""
    methods = [system.method for system in systems]
    names = {}
    for system in systems:
        agent = f" ({system.agent})" if methods.count(system.method) > 1 else ""
        names[system] = renamed.get(system.method, system.method) + agent
    return names


def paper_name(environment: str) -> str:
    """The paper's name of an environment; other environments, also several at once, keep their names."""
    if "," in environment:
        return environment
    return next((name for part, name in ENVIRONMENTS.items() if part in environment.lower()), environment)


def _table(
    name: str,
    title: str,
    headings: Label,
    entries: Mapping[tuple[Label, Label], Entry],
    results: Results,
    datasets: Sequence[str],
) -> Table:
    rows = list(dict.fromkeys(row for row, _ in entries))
    columns = list(dict.fromkeys(column for _, column in entries))
    texts = any(results.kinds[dataset] == "text" for dataset in datasets)
    measured = any("ssim" in one.metrics for group in results.groups.values() for one in group)
    notes = []
    if texts and not measured:
        notes.append("SSim was not measured: `--ssim-model DIR` names its encoder.")
    return Table(name, title, headings, rows, columns, entries, notes)
