"""The paper's Tables 2 to 5, from scored predictions.

Tables 2, 3    results on the trained datasets and out of distribution; one column per method
Table 4        ablations; one row each
Table 5        transfer: agents by the environment of their training, with each environment
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.evaluation import paper_numbers
from prompt_r1.evaluation.aggregate import LABELS, REPORTED_METRICS, Rate, Results
from prompt_r1.evaluation.predictions import System, system_names
from prompt_r1.metrics.statistics import bounds_text
from prompt_r1.terminal import printable_line

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
# The untrained agent without an environment, of which only the paper has numbers → its column.
AGENT_ALONE = {
    System("direct", "Qwen3-4B", "paper"): "Qwen3-4B, paper",
    System("cot", "Qwen3-4B", "paper"): "CoT (Qwen3-4B), paper",
}
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

Label = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One cell of a table: a measured rate (from 0 to 1, shown in percent) or a plain number."""

    rate: Rate | None = None
    number: float | None = None
    best: bool = False
    paper: float | None = None  # the paper's number, in percent
    usual_n: int = 0  # questions of the dataset; a rate over fewer shows its own n

    def __str__(self) -> str:
        rate, number = self.rate, self.number
        if number is not None:
            if number >= 100:
                return f"{number:,.0f}"
            return f"{number:.2f}" if number >= 0.01 or not number else f"{number:.2g}"
        if rate is None:
            return "–"
        mean = f"**{100 * rate.mean:.1f}**" if self.best else f"{100 * rate.mean:.1f}"
        parts = [f"n {rate.n}"] if rate.n != self.usual_n else []
        parts += [f"{rate.errors} errors"] if rate.errors else []
        missing = f" ({', '.join(parts)})" if parts else ""
        return f"{mean} {bounds_text(100 * rate.low, 100 * rate.high, '.1f')}{missing}"


Entries = dict[tuple[Label, Label], Entry]
PaperNumber = Callable[[System, str, str], float | None]
"""System, dataset (or AVERAGE) and metric → the paper's number in percent."""


@dataclass(frozen=True)
class Table:
    """Cells by the labels of their row and column, of one or more parts. Those without an entry are empty."""

    title: str
    headings: Label  # of the parts of a row's label
    entries: Entries

    def markdown(self) -> str:
        """The table with intervals; below each row the paper's numbers, if it has any."""
        columns = list(dict.fromkeys(column for _, column in self.entries))
        header = [*self.headings, *(" ".join(filter(None, column)) for column in columns)]
        cells = markdown_table(header, list(self._rows(columns)), left=len(self.headings))
        return f"### {printable_line(self.title)}\n\n{cells}"

    def _rows(self, columns: Sequence[Label]) -> Iterator[list[str]]:
        for row in dict.fromkeys(row for row, _ in self.entries):
            entries = [self.entries.get((row, column), Entry()) for column in columns]
            yield [*row, *map(str, entries)]
            papers = ["" if entry.paper is None else f"{entry.paper:.2f}" for entry in entries]
            if any(papers):
                yield [*[""] * (len(row) - 1), f"{row[-1]}, paper", *papers]


def paper_tables(results: Results, trained_with: Mapping[str, str]) -> list[Table]:
    """The tables that the predictions can fill. `trained_with`: agent → the environment of its training."""
    environments = list(dict.fromkeys(system.environment for system in results.systems if system.environment))
    trained, held_out = split_datasets(results)
    tables = []
    for environment in environments or [""]:
        systems = _systems_with(environment, results, trained_with)
        where = f", environment {environment}" if environment else ""
        if trained:
            tables.append(_results_table(f"Table 2: results{where}", results, systems, environment, trained))
        if held_out:
            title = f"Table 3: results out of distribution{where}"
            tables.append(_results_table(title, results, systems, environment, held_out))
        methods = {system.method for system in systems}
        if FULL in methods and len(methods & set(ABLATIONS)) > 1:
            tables.append(_ablations_table(f"Table 4: ablations{where}", results, systems, environment))
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
        "calls / question": mean(one.spent.calls for one in answered),
        "tokens / question": mean(one.spent.tokens for one in answered),
        "$ / 1,000 questions": 1000 * mean(one.spent.usd for one in answered),
        "no answer, %": 100 * mean(not one.answer for one in answered),
    }


def _results_table(
    title: str, results: Results, systems: Sequence[System], environment: str, datasets: Sequence[str]
) -> Table:
    """A row for each dataset and metric, then averages and costs; a column for each system.

    With the paper's environment, two more columns have its numbers of the untrained agent alone.
    """
    tables = (paper_numbers.TRAINED, paper_numbers.OUT_OF_DISTRIBUTION)
    averaged = next((table for table in tables if set(table) == set(datasets)), ())

    def paper_number(system: System, dataset: str, metric: str) -> float | None:
        column = COLUMNS.get((system.method, paper_name(system.environment)), "")
        return paper_numbers.main_result(column, averaged if dataset == AVERAGE else [dataset], metric)

    names = system_names(systems, {})
    if paper_name(environment) == GPT_4O_MINI:
        names |= AGENT_ALONE
    entries: Entries = {}
    for (system, label), entry in _measure(results, list(names), datasets, paper_number).items():
        if system in systems or entry.paper is not None:
            entries[label, (names[system],)] = entry
    for system in systems:
        for cost, number in costs(results, system, datasets).items():
            entries[(cost, ""), (names[system],)] = Entry(number=number)
    return Table(title, ("dataset", "metric"), entries)


def _ablations_table(title: str, results: Results, systems: Sequence[System], environment: str) -> Table:
    def paper_number(system: System, dataset: str, metric: str) -> float | None:
        if paper_name(environment) != GPT_4O_MINI:
            return None
        return paper_numbers.ablation(ABLATIONS[system.method], dataset, metric)

    chosen = [system for method in ABLATIONS for system in systems if system.method == method]
    return _table_by_system(title, system_names(chosen, ABLATIONS), results, paper_number)


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
    return _table_by_system("Table 5: transfer between environments", labels, results, paper_number)


def _table_by_system(
    title: str, labels: Mapping[System, str], results: Results, paper_number: PaperNumber
) -> Table:
    """A row for each system, a column for each dataset and metric."""
    measured = _measure(results, list(labels), list(results.kinds), paper_number)
    entries: Entries = {((labels[system],), label): entry for (system, label), entry in measured.items()}
    return Table(title, ("",), entries)


def _measure(
    results: Results, systems: Sequence[System], datasets: Sequence[str], paper_number: PaperNumber
) -> dict[tuple[System, Label], Entry]:
    """Each system's rates by dataset and metric, then the averages; the best ones are marked."""
    wanted = [(name, metric) for name in datasets for metric in REPORTED_METRICS[results.kinds[name]]]
    if len(datasets) > 1:
        wanted += [(AVERAGE, metric) for metric in LABELS]
    entries: dict[tuple[System, Label], Entry] = {}
    for name, metric in wanted:
        averaged = datasets if name == AVERAGE else [name]
        rates = {system: results.average(system, averaged, metric) for system in systems}
        found = [rate for rate in rates.values() if rate is not None]
        if not found:
            continue
        n, best = max(rate.n for rate in found), max(rate.mean for rate in found)
        label = (f"{name} (n = {n})", LABELS[metric])
        for system, rate in rates.items():
            is_best = rate is not None and rate.mean > best - 1e-12
            paper = paper_number(system, name, metric)
            entries[system, label] = Entry(rate, best=is_best, paper=paper, usual_n=n)
    return entries


def _systems_with(environment: str, results: Results, trained_with: Mapping[str, str]) -> list[System]:
    """The systems with this environment or without any.

    If agents were trained with it, agents that were trained with another one are left out.
    """
    systems = [system for system in results.systems if system.environment in (environment, "")]
    at_home = [system for system in systems if trained_with.get(system.agent) == environment]
    if not at_home:
        return systems
    return [system for system in systems if system.agent not in trained_with or system in at_home]


def paper_name(environment: str) -> str:
    """The paper's name of an environment; other environments, also several at once, keep their names."""
    if "," in environment:
        return environment
    return next((name for part, name in ENVIRONMENTS.items() if part in environment.lower()), environment)
