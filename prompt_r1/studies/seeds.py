"""`studies seeds FOLDER …`: one table from the results of several seeds.

Each FOLDER is the --out of an `evaluate.py` with a seed of its own, which has its own training and questions.
A row for each method: its score with each seed, the mean with a 95 % interval over questions and seeds, the
difference to --reference on paired questions, and the calls before the first answer and for each question.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from prompt_r1.cli.command_line import program_name
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import REPORTED_METRICS, score_predictions
from prompt_r1.evaluation.predictions import Prediction, read_predictions
from prompt_r1.metrics.statistics import (
    bounds_text,
    difference_interval,
    macro_interval,
    mean_interval,
    seeds_interval,
)
from prompt_r1.storage.run_log import read_metrics

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True)
class Measured:
    """One row of the tables."""

    name: str
    # (seed, dataset) → question → score
    scores: Mapping[tuple[int, str], Mapping[str, float]]
    calls_before: float = 0.0  # mean over the seeds: task and optimiser calls, or those of the training
    dollars_before: float = 0.0
    calls: float = 0.0  # per question
    dollars: float = 0.0  # per 1,000 questions


def main(arguments: list[str]) -> None:
    """Print the table from a command line."""
    name = program_name("python -m prompt_r1.studies")
    parser = argparse.ArgumentParser(f"{name} seeds", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+", help="--out of evaluate.py, one for each seed")
    parser.add_argument("--reference", default="prompt-r1", help="method to compare with (prompt-r1)")
    parser.add_argument("--env", default="", help="environment, where the folders have answers of several")
    parser.add_argument("--data", nargs="+", default=(), help="names of datasets, to average over (all)")
    given = parser.parse_args(arguments)
    folders = dict(enumerate(given.folder))
    first = read_predictions(given.folder[0] / PREDICTIONS)
    methods = list(dict.fromkeys(one.system.method for one in first))
    if given.reference not in methods:
        raise UsageError(
            f"{given.folder[0]} has no answers of {given.reference}; --reference names one of {methods}"
        )
    rows = [measure(folders, method, given.env) for method in methods]
    datasets = list(dict.fromkeys(dataset for row in rows for _, dataset in row.scores))
    wanted = given.data or sorted(datasets)
    for dataset in wanted:
        for number, folder in folders.items():
            if any((number, dataset) not in row.scores for row in rows):
                raise UsageError(f"{folder} lacks answers to {dataset}, of {datasets}")
    print(table(rows, wanted, list(folders), given.reference, f"below {given.reference}"))


def table(
    rows: Sequence[Measured], kinds: Sequence[str], seeds: Sequence[int], reference: str, below: str
) -> str:
    """A row for each method: quality, how far it is below the row `reference`, costs, and each kind."""
    header = ["method", "mean [95 %]", "by seed", f"{below} [95 %]"]
    header += ["calls before", "$ before", "calls / question", "$ / 1,000"]
    best = next(row for row in rows if row.name == reference)
    lines = []
    for row in rows:
        groups = [(seed, kind) for seed in seeds for kind in kinds]
        scores = {key: list(row.scores[key].values()) for key in groups}
        gaps = {key: gap(best.scores[key], row.scores[key]) for key in groups}
        by_seed = ", ".join(f"{100 * mean:.1f}" for mean in means_of_seeds(scores))
        cells = [row.name, percent(scores), by_seed, "" if row is best else percent(gaps, difference=True)]
        cells += [f"{row.calls_before:,.0f}", f"{row.dollars_before:.3f}"]
        cells += [f"{row.calls:.2f}", f"{row.dollars:.4f}"]
        cells += [percent({(seed, kind): scores[seed, kind] for seed in seeds}) for kind in kinds]
        lines.append(cells)
    return markdown_table([*header, *kinds], lines)


def gap(ceiling: Mapping[str, float], scores: Mapping[str, float]) -> list[float]:
    """The differences to the ceiling, question by question."""
    assert ceiling.keys() == scores.keys(), "not the same questions"
    return [ceiling[question] - score for question, score in scores.items()]


def percent(groups: Mapping[tuple[int, str], Sequence[float]], *, difference: bool = False) -> str:
    """The mean of the groups' means in percent, with its interval over questions and seeds."""
    names = {f"{seed} {kind}": values for (seed, kind), values in groups.items()}
    questions = macro_interval(names, difference_interval if difference else mean_interval)
    means = means_of_seeds(groups)
    low, high = seeds_interval(means, questions)
    if not difference:
        low, high = max(0.0, low), min(1.0, high)
    form = "+.1f" if difference else ".1f"
    return f"{100 * fmean(means):{form}} {bounds_text(100 * low, 100 * high, form)}"


def means_of_seeds(groups: Mapping[tuple[int, str], Sequence[float]]) -> list[float]:
    """The mean of the kinds' means with each seed."""
    means: dict[int, list[float]] = defaultdict(list)
    for (seed, _), values in groups.items():
        means[seed].append(fmean(values))
    return list(map(fmean, means.values()))


def measure(folders: Mapping[int, Path], method: str, environment: str = "") -> Measured:
    """A method's scores and costs over the seeds, from the results folder of each."""
    found = {seed: answers_of(method, folder, environment) for seed, folder in folders.items()}
    before = [preparation(folders[seed], method, of[0].system.agent) for seed, of in found.items()]
    return Measured(
        method,
        scores_of(found),
        fmean(calls for calls, _ in before),
        fmean(dollars for _, dollars in before),
        fmean(fmean(one.spent.calls for one in of) for of in found.values()),
        1000 * fmean(fmean(one.spent.usd for one in of) for of in found.values()),
    )


def answers_of(method: str, folder: Path, environment: str = "") -> list[Prediction]:
    """The answers of a method with its newest settings, and with one environment, from a results folder."""
    found = [one for one in read_predictions(folder / PREDICTIONS) if one.system.method == method]
    there = list(dict.fromkeys(one.system.environment for one in found))
    if len(there) > 1 and not environment:
        raise UsageError(f"{folder} has answers with several environments: choose one of {there} with --env")
    chosen = [one for one in found if not environment or one.system.environment == environment]
    if not chosen:
        raise UsageError(f"{folder} has no answers of {method}" + f" with {environment}" * bool(environment))
    return chosen


def scores_of(found: Mapping[int, list[Prediction]]) -> dict[tuple[int, str], dict[str, float]]:
    """(seed, dataset) → question → score, of the answers of each seed."""
    scores = {}
    for seed, predictions in found.items():
        results = score_predictions(predictions)
        [system] = results.systems
        for dataset, kind in results.kinds.items():
            scores[seed, dataset] = results.scores(system, dataset, REPORTED_METRICS[kind][0])
    return scores


def preparation(results: Path, method: str, agent: str) -> tuple[float, float]:
    """The calls and dollars that a method took before its first answer; those of a training from its run."""
    if method in ("prompt-r1", "agent-only"):
        lines = read_metrics(Path(agent))
        calls = sum(line.get("env/paid", 0.0) + line.get("env/reused", 0.0) for line in lines)
        return calls, max((line.get("env/usd", 0.0) for line in lines), default=0.0)  # of the whole run
    path = results / "preparation.json"
    noted = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for system, spent in noted.items():
        if system.split(" (")[0] == method:
            return spent["task_calls"] + spent["optimizer_calls"], spent["usd"]
    return 0.0, 0.0
