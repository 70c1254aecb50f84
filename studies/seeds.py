"""One table from the evaluations of several seeds: `python -m studies.seeds FOLDER …`.

Each FOLDER is the --out of an `evaluate.py` with a seed of its own, which has its own training and questions.
A row for each method: EM (F1 of free texts) with each seed, its mean with a 95 % interval over questions and
seeds, the difference to --reference on paired questions, and calls of the environment. With --pass K the
score of repeated answers (`evaluate.py --temperature 1 --repeats 32`) is pass@K (Chen et al. 2021, eq. 1).
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from math import comb, sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from numpy.typing import ArrayLike

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import FILE, Prediction, read_predictions
from prompt_r1.evaluation.statistics import RESAMPLES, bootstrap, bounds_text, macro_interval, mean_interval
from prompt_r1.f1 import exact_match, f1
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.tables import markdown_table

# Of Student's t: ± what holds 95 %, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
FEW_DIFFERENCES = 10

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
    """A row for each method, from the answers of each seed. Raises UsageError if some are missing."""
    methods = list(dict.fromkeys(one.system.method for one in answers[0]))
    if reference not in methods:
        raise UsageError(f"there are no answers of {reference}; --reference names one of {methods}")
    datasets = datasets or sorted({one.question.dataset for one in answers[0]})
    scores = {method: scores_of(answers, method, datasets, k) for method in methods}
    rows = []
    for method in methods:
        own, gaps = scores[method], gaps_of(scores[reference], scores[method])
        by_seed = ", ".join(f"{100 * mean:.1f}" for mean in means_of_seeds(own))
        calls = fmean(one.spent.calls for of in answers for one in of if one.system.method == method)
        columns = [percent({key: own[key] for key in own if key[1] == dataset}) for dataset in datasets]
        below = "" if method == reference else percent(gaps, difference_interval, form="+.1f")
        rows.append([method, percent(own), by_seed, below, f"{calls:.2f}", *columns])
    header = ["method", "mean [95 %]", "by seed", f"below {reference} [95 %]", "calls / question"]
    return markdown_table([*header, *datasets], rows)


def difference_interval(differences: ArrayLike, *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The bootstrap interval of the mean of paired differences: of two scores of each question.

    If fewer than ten questions differ, resampling underestimates the spread. One win for each side is then
    added to the sample, as Bonett and Price (2012) do for rates.
    """
    observed = np.asarray(differences, dtype=np.float64)
    few = np.count_nonzero(observed) < FEW_DIFFERENCES
    return bootstrap(np.append(observed, (1.0, -1.0)) if few else observed, len(observed), resamples)


def scores_of(
    answers: Sequence[Sequence[Prediction]], method: str, datasets: Sequence[str], k: int
) -> Scores:
    """The scores of a method; of repeated answers the mean, or pass@k. Failed calls are left out."""
    scores: Scores = {}
    for number, predictions in enumerate(answers):
        for dataset in datasets:
            marks: dict[str, list[float]] = {}
            for one in predictions:
                if (one.system.method, one.question.dataset) == (method, dataset) and not one.error:
                    metric = f1 if one.question.kind == "text" else exact_match
                    score = metric(one.answer or "", one.question.answers)
                    marks.setdefault(one.question.id, []).append(score)
            if min(map(len, marks.values()), default=0) < k:
                raise UsageError(f"folder {number + 1} lacks {k} answers of {method} to {dataset}")
            scores[number, dataset] = {question: pass_at_k(each, k) for question, each in marks.items()}
    return scores


def pass_at_k(marks: Sequence[float], k: int) -> float:
    """The chance that k of the answers with these marks hold a right one; for k = 1 the mean mark."""
    if k == 1:
        return fmean(marks)
    return 1 - comb(len(marks) - sum(mark == 1 for mark in marks), k) / comb(len(marks), k)


def gaps_of(reference: Scores, scores: Scores) -> Scores:
    """How far the scores are below those of the reference, question by question."""
    if any(scores[key].keys() != of.keys() for key, of in reference.items()):
        raise UsageError("the methods have answered different questions; finish the evaluations")
    return {key: {one: of[one] - scores[key][one] for one in of} for key, of in reference.items()}


def percent(scores: Scores, interval: Callable = mean_interval, form: str = ".1f") -> str:
    """The mean of the datasets' means in percent, with its interval over questions and seeds."""
    groups = {str(key): list(of.values()) for key, of in scores.items()}
    low, high = seeds_interval(means_of_seeds(scores), macro_interval(groups, interval))
    if interval is mean_interval:
        low, high = max(0.0, low), min(1.0, high)
    mean = fmean(means_of_seeds(scores))
    return f"{100 * mean:{form}} {bounds_text(100 * low, 100 * high, form)}"


def means_of_seeds(scores: Mapping[tuple[int, str], Mapping[str, float]]) -> list[float]:
    """The mean of the datasets' means of each seed."""
    seeds = dict.fromkeys(seed for seed, _ in scores)
    return [fmean(fmean(of.values()) for key, of in scores.items() if key[0] == seed) for seed in seeds]


def seeds_interval(means: Sequence[float], questions: tuple[float, float]) -> tuple[float, float]:
    """Student's interval of the mean over seeds, not narrower than `questions`, that over their questions."""
    if len(means) == 1:
        return questions
    half = STUDENT[min(len(means) - 1, max(STUDENT))] * stdev(means) / sqrt(len(means))
    return min(questions[0], fmean(means) - half), max(questions[1], fmean(means) + half)


if __name__ == "__main__":
    run_program(main)
