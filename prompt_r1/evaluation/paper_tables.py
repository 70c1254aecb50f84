"""The paper's Tables 2 to 5 from scored predictions: its layout, with intervals, and its numbers beside ours.

table2, table3    results on the trained datasets, and out of distribution: a column a method
table4            ablations: a row each
table5            transfer: agents by the environment they were trained with, on each environment
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from prompt_r1.evaluation import paper_numbers
from prompt_r1.evaluation.aggregate import FIGURES, LABELS, Scores
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.tables import Entry, Label, Table

COLUMNS = {  # method → the paper's column in Tables 2 and 3
    "direct": "GPT-4o-mini", "sft": "SFT (Qwen3-4B)", "cot": "CoT (GPT-4o-mini)",
    "grpo-only": "GRPO (Qwen3-4B)", "opro": "OPRO", "textgrad": "TextGrad", "gepa": "GEPA",
    "prompt-r1": "Prompt-R1",
}  # fmt: skip
ABLATIONS = {  # method → the row in Table 4
    "agent-only": "w/o Env.", "untrained": "w/o R.L.", "direct": "w/o Agent", "prompt-r1": "Prompt-R1 (Full)",
}  # fmt: skip
ENVIRONMENTS = {"4o-mini": "GPT-4o-mini", "oss-20b": "GPT-OSS-20B"}  # part of a model's name → Table 5's
FULL = "prompt-r1"
AVERAGE = "Average"

Reported = Callable[[System, str, str], float | None]
"""System, dataset (or AVERAGE), metric → the paper's number, in percent."""


@dataclass(frozen=True)
class Figure:
    """A row of Tables 2 and 3, or a column of Tables 4 and 5."""

    dataset: str
    metric: str
    n: int

    @property
    def label(self) -> Label:
        return f"{self.dataset} (n = {self.n})", LABELS[self.metric]


def paper_tables(scores: Scores, trained_with: Mapping[str, str]) -> list[Table]:
    """The tables that the predictions can fill. `trained_with`: agent → the environment of its training."""
    environments = list(dict.fromkeys(system.environment for system in scores.systems if system.environment))
    trained, held_out = split_datasets(scores)
    tables = []
    for environment in environments or [""]:
        systems = _systems_with(environment, scores, trained_with)
        suffix = "" if environment == (environments or [""])[0] else f"-{environment}"
        where = f", environment {environment}" if environment else ""
        if trained:
            title = f"Table 2: results{where}"
            tables.append(_results(scores, systems, trained, f"table2{suffix}", title))
        if held_out:
            title = f"Table 3: results out of distribution{where}"
            tables.append(_results(scores, systems, held_out, f"table3{suffix}", title))
        if {FULL} < {system.method for system in systems} & set(ABLATIONS):
            tables.append(_ablations(scores, systems, f"table4{suffix}", f"Table 4: ablations{where}"))
    if len({system for system in scores.systems if system.method == FULL}) > 1:
        tables.append(_transfer(scores, trained_with))
    return tables


def split_datasets(scores: Scores) -> tuple[list[str], list[str]]:
    """The datasets that stand for trained ones, and those out of distribution."""
    held_out = [
        name for name in scores.kinds if name in paper_numbers.OUT_OF_DISTRIBUTION or name.endswith("_ood")
    ]
    return [name for name in scores.kinds if name not in held_out], held_out


def costs(scores: Scores, system: System, datasets: Sequence[str]) -> dict[str, float]:
    """What a system spends on a question in the test, and the share of questions it leaves unanswered."""
    predictions = [one.prediction for name in datasets for one in scores.groups.get((system, name), [])]
    ended = [one for one in predictions if not one.error]
    if not ended:
        return {}
    return {
        "calls / question": mean(one.calls for one in ended),
        "tokens / question": mean(one.tokens_in + one.tokens_out for one in ended),
        "$ / 1,000 questions": 1000 * mean(one.usd for one in ended),
        "no answer, %": 100 * mean(not one.prediction for one in ended),
    }


def _results(
    scores: Scores, systems: Sequence[System], datasets: Sequence[str], name: str, title: str
) -> Table:
    """A row for each dataset and metric, then the averages and what an answer costs; a column a system."""

    def reported(system: System, dataset: str, metric: str) -> float | None:
        column = COLUMNS.get(system.method, "")
        if dataset != AVERAGE:
            return paper_numbers.main_result(column, dataset, metric)
        same = next((table for table in (paper_numbers.TRAINED, paper_numbers.OUT_OF_DISTRIBUTION)
                     if set(table) == set(datasets)), None)  # fmt: skip
        return paper_numbers.average(column, same, metric) if same else None

    names = _names(systems, {})
    entries: dict[tuple[Label, Label], Entry] = {
        (figure.label, (names[system],)): entry
        for (figure, system), entry in _measure(scores, systems, datasets, reported).items()
    }
    for system in systems:
        for label, number in costs(scores, system, datasets).items():
            entries[(label, ""), (names[system],)] = Entry(number=number)
    return _table(name, title, ("dataset", "metric"), entries, scores, datasets)


def _ablations(scores: Scores, systems: Sequence[System], name: str, title: str) -> Table:
    def reported(system: System, dataset: str, metric: str) -> float | None:
        return paper_numbers.ablation(ABLATIONS[system.method], dataset, metric)

    chosen = [system for method in ABLATIONS for system in systems if system.method == method]
    names, datasets = _names(chosen, ABLATIONS), list(scores.kinds)
    measured = _measure(scores, chosen, datasets, reported)
    rows = {(names[system], figure): entry for (figure, system), entry in measured.items()}
    by_row = sorted(rows.items(), key=lambda item: list(names.values()).index(item[0][0]))
    entries: dict[tuple[Label, Label], Entry] = {
        ((row,), figure.label): entry for (row, figure), entry in by_row
    }
    return _table(name, title, ("",), entries, scores, datasets)


def _transfer(scores: Scores, trained_with: Mapping[str, str]) -> Table:
    """Each environment alone, then each agent with each environment."""

    def reported(system: System, dataset: str, metric: str) -> float | None:
        home, here = _paper_name(trained_with.get(system.agent, "")), _paper_name(system.environment)
        return paper_numbers.transfer(home, here, dataset, metric)

    def label(system: System) -> str:
        if system.method != FULL:
            return f"{system.environment} alone"
        home = trained_with.get(system.agent, "?")
        agent = f" ({system.agent})" if list(trained_with.values()).count(home) > 1 else ""
        return f"trained with {home}{agent}, tested with {system.environment}"

    chosen = [system for method in ("direct", FULL) for system in scores.systems if system.method == method]
    datasets = list(scores.kinds)
    measured = _measure(scores, chosen, datasets, reported)
    by_row = sorted(measured.items(), key=lambda item: chosen.index(item[0][1]))
    entries: dict[tuple[Label, Label], Entry] = {
        ((label(system),), figure.label): entry for (figure, system), entry in by_row
    }
    return _table("table5", "Table 5: transfer between environments", ("",), entries, scores, datasets)


def _measure(
    scores: Scores, systems: Sequence[System], datasets: Sequence[str], reported: Reported
) -> dict[tuple[Figure, System], Entry]:
    """All that was measured, by dataset and metric, then the averages; the best ones are marked."""
    measured: dict[tuple[Figure, System], Entry] = {}
    wanted = [(name, metric) for name in datasets for metric in FIGURES[scores.kinds[name]]]
    wanted += [(AVERAGE, metric) for metric in LABELS if len(datasets) > 1]
    for name, metric in wanted:
        cells = {
            system: scores.average(system, datasets, metric)
            if name == AVERAGE
            else scores.cell(system, name, metric)
            for system in systems
        }
        found = [cell for cell in cells.values() if cell is not None]
        if not found:
            continue
        n, best = max(cell.n for cell in found), max(cell.mean for cell in found)
        for system, cell in cells.items():
            measured[Figure(name, metric, n), system] = Entry(
                cell,
                best=cell is not None and cell.mean > best - 1e-12,
                paper=reported(system, name, metric),
                usual_n=n,
            )
    return measured


def _systems_with(environment: str, scores: Scores, trained_with: Mapping[str, str]) -> list[System]:
    """The systems of this environment or of none; of trained agents those trained with it, if any was."""
    systems = [system for system in scores.systems if system.environment in (environment, "")]
    at_home = [system for system in systems if trained_with.get(system.agent) == environment]
    if not at_home:
        return systems
    return [system for system in systems if system.agent not in trained_with or system in at_home]


def _names(systems: Sequence[System], renamed: Mapping[str, str]) -> dict[System, str]:
    """What tells the systems apart: the method; with its agent where a method comes with several."""
    methods = [system.method for system in systems]
    return {
        system: renamed.get(system.method, system.method)
        + (f" ({system.agent})" if methods.count(system.method) > 1 else "")
        for system in systems
    }


def _paper_name(spec: str) -> str:
    return next((name for part, name in ENVIRONMENTS.items() if part in spec.lower()), spec)


def _table(
    name: str, title: str, heads: Label, entries: Mapping[tuple[Label, Label], Entry], scores: Scores,
    datasets: Sequence[str],
) -> Table:  # fmt: skip
    rows, columns = (list(dict.fromkeys(key[axis] for key in entries)) for axis in (0, 1))
    texts = any(scores.kinds[dataset] == "text" for dataset in datasets)
    measured = any("ssim" in one.values for group in scores.groups.values() for one in group)
    lacking = texts and not measured
    notes = ["SSim was not measured: `--ssim-model DIR` names its encoder."] if lacking else []
    return Table(name, title, heads, rows, columns, entries, notes)
