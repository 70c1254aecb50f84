"""One table from the evaluations of several seeds: `python -m studies.seeds FOLDER …`.

Each FOLDER is the --out of an `evaluate.py` with another seed. Each seed has its own training and its own
questions. The table has a row for each method. Its columns:

- EM (F1 of free texts): the mean over datasets and seeds with a 95 % interval, and the mean of each seed.
  The interval of one seed is Wilson's over questions. The interval of several seeds is Student's over the
  seeds' means, and at least as wide as Wilson's over all their questions.
- The difference to --reference on the same questions. The interval is Student's over seeds, so a single seed
  has no interval.
- The calls of the environment per question.

With --pass K, the score of repeated answers (`evaluate.py --temperature 1 --repeats 32`) is pass@K (Chen et
al. 2021, eq. 1).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from math import comb, sqrt
from pathlib import Path
from statistics import fmean, stdev

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.intervals import bounds_text, mean_interval
from prompt_r1.evaluation.predictions import FILE, Prediction, read_predictions
from prompt_r1.evaluation.searches import task_score
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.tables import markdown_table

# By degrees of freedom: with a probability of 95 %, a variable of Student's t is within ± this number.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

Scores = dict[tuple[int, str], dict[str, float]]
"""(number of the folder, dataset) → question → score."""


def main(arguments: list[str]) -> None:
    """Print the table from a command line."""
    parser = argparse.ArgumentParser("python -m studies.seeds", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+", help="--out of evaluate.py, one for each seed")
    parser.add_argument("--reference", default="prompt-r1", help="method to compare with (prompt-r1)")
    parser.add_argument("--data", nargs="+", default=(), help="names of datasets, to average over (all)")
    parser.add_argument("--pass", dest="k", type=int, default=1, metavar="K", help="score by pass@K (1)")
    given = parser.parse_args(arguments)
    answers = [read_predictions(folder / FILE) for folder in given.folder]
    print(table(answers, given.reference, given.data, given.k))


def table(
    answers: Sequence[Sequence[Prediction]], reference: str, datasets: Sequence[str] = (), k: int = 1
) -> str:
    """A table with a row for each method. `answers` has the answers of each seed.

    Raises UsageError if answers are missing.
    """
    methods = list(dict.fromkeys(one.system.method for one in answers[0]))
    if reference not in methods:
        raise UsageError(f"there are no answers of {reference}; --reference names one of {methods}")
    datasets = datasets or sorted({one.question.dataset for one in answers[0]})
    scores = {method: scores_of(answers, method, datasets, k) for method in methods}
    rows = []
    for method in methods:
        own = scores[method]
        below = "" if method == reference else difference(scores[reference], own)
        calls = [one.spent.calls for of_seed in answers for one in of_seed if one.system.method == method]
        row = [method, percent(own), percent_by_seed(own), below, f"{fmean(calls):.2f}"]
        for dataset in datasets:
            row.append(percent(of_dataset(own, dataset)))
        rows.append(row)
    header = ["method", "mean [95 %]", "by seed", f"below {reference} [95 %]", "calls / question"]
    return markdown_table([*header, *datasets], rows)


def scores_of(
    answers: Sequence[Sequence[Prediction]], method: str, datasets: Sequence[str], k: int
) -> Scores:
    """The scores of a method: means over repeated answers (k = 1), or pass@k. Failed calls are left out."""
    scores: Scores = {}
    for number, predictions in enumerate(answers):
        for dataset in datasets:
            marks: dict[str, list[float]] = {}
            for one in predictions:
                is_asked = one.system.method == method and one.question.dataset == dataset
                if is_asked and not one.error:
                    marks.setdefault(one.question.id, []).append(task_score(one))
            fewest = min((len(each) for each in marks.values()), default=0)
            if fewest < k:
                raise UsageError(f"folder {number + 1} lacks {k} answers of {method} to {dataset}")
            scores[number, dataset] = {question: pass_at_k(each, k) for question, each in marks.items()}
    return scores


def pass_at_k(marks: Sequence[float], k: int) -> float:
    """The probability that k of the answers with these marks contain a right answer; k = 1: the mean mark."""
    if k == 1:
        return fmean(marks)
    wrong = sum(mark != 1 for mark in marks)
    return 1 - comb(wrong, k) / comb(len(marks), k)


def percent(scores: Scores) -> str:
    """The mean of the datasets' means in percent, with its interval (over questions, or over seeds)."""
    means = means_of_seeds(scores)
    low, high = mean_interval([list(marks.values()) for marks in scores.values()])
    if len(means) > 1:
        lowest, highest = student_interval(means)
        low = max(0.0, min(low, lowest))
        high = min(1.0, max(high, highest))
    return f"{100 * fmean(means):.1f} {bounds_text(100 * low, 100 * high, '.1f')}"


def percent_by_seed(scores: Scores) -> str:
    """The mean of the datasets' means of each seed in percent."""
    return ", ".join(f"{100 * mean:.1f}" for mean in means_of_seeds(scores))


def difference(scores: Scores, subtracted: Scores, form: str = "+.1f", *, scale: float = 100.0) -> str:
    """The mean of `scores` minus `subtracted` on the same questions, with its interval over seeds.

    The seeds are those that `scores` has. By default, the difference is in percent. Raises UsageError if
    `subtracted` has other questions.
    """
    gaps: Scores = {}
    for key, marks in scores.items():
        if subtracted[key].keys() != marks.keys():
            raise UsageError("the methods have answered different questions; finish the evaluations")
        gaps[key] = {question: marks[question] - subtracted[key][question] for question in marks}
    return mean_text([scale * mean for mean in means_of_seeds(gaps)], form)


def mean_text(means: Sequence[float], form: str) -> str:
    """The mean of one number for each seed, with Student's interval if there are several seeds."""
    shown = f"{fmean(means):{form}}"
    if len(means) == 1:
        return shown
    return f"{shown} {bounds_text(*student_interval(means), form)}"


def student_interval(means: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the mean over at least two seeds. `means`: one mean per seed."""
    assert len(means) > 1, "one seed says nothing about the spread of seeds"
    # Beyond the table, its last value makes the interval a little too wide.
    freedom = min(len(means) - 1, max(STUDENT))
    half = STUDENT[freedom] * stdev(means) / sqrt(len(means))
    return fmean(means) - half, fmean(means) + half


def of_dataset(scores: Scores, dataset: str) -> Scores:
    """The scores of one dataset."""
    return {key: marks for key, marks in scores.items() if key[1] == dataset}


def means_of_seeds(scores: Mapping[tuple[int, str], Mapping[str, float]]) -> list[float]:
    """The mean of the datasets' means of each seed."""
    by_seed: dict[int, list[float]] = {}
    for (seed, _), marks in scores.items():
        by_seed.setdefault(seed, []).append(fmean(marks.values()))
    return [fmean(means) for means in by_seed.values()]


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
