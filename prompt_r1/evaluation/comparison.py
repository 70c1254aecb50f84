"""Paired comparisons of the full method with the others, on the same questions.

Pairs are formed by question, and the datasets have equal weights: the mean difference and its bootstrap
interval (10,000 resamples), which is not corrected for the number of methods.
"""

from dataclasses import dataclass
from math import isfinite

import numpy as np

from prompt_r1.cli.tables import markdown_table
from prompt_r1.evaluation.aggregate import EXTRACTED, REPORTED_METRICS, Results
from prompt_r1.evaluation.predictions import System
from prompt_r1.metrics.statistics import bounds_text, difference_interval, macro_interval

FULL = "prompt-r1"  # the method that the others are compared with
HEADER = ("second", "metric", "n", "first", "second", "difference [95 %]", "verdict")


@dataclass(frozen=True)
class Comparison:
    """First against second system; rates from 0 to 1."""

    n: int  # questions that both answered
    failed: int  # questions for which a call of either system failed
    first: float
    second: float
    low: float  # 95 % interval of first - second
    high: float

    @property
    def points(self) -> str:
        """The difference in points, with its interval: +1.2 [-0.3, +2.7]."""
        interval = bounds_text(100 * self.low, 100 * self.high, "+.1f")
        return f"{100 * (self.first - self.second):+.1f} {interval}"

    @property
    def verdict(self) -> str:
        """Significant if the interval excludes 0, else the bound of the difference in points."""
        if not isfinite(self.high):
            return "too few questions"
        if self.low > 0 or self.high < 0:
            return "significant"
        return f"within ±{100 * min(1.0, max(abs(self.low), abs(self.high))):.1f}"


def compare_systems(
    results: Results, first: System, second: System, *, metric: str = ""
) -> Comparison | None:
    """Compare two systems by a metric, or by the main metric of each dataset's kind; None without pairs."""
    pairs, asked = {}, 0
    for dataset, kind in results.kinds.items():
        wanted = metric or REPORTED_METRICS[kind][0]
        scores_1, scores_2 = (results.scores(system, dataset, wanted) for system in (first, second))
        both = [(scores_1[name], scores_2[name]) for name in scores_1 if name in scores_2]
        if both:
            pairs[dataset] = np.array(both)  # (n, 2)
            asked += len({one.question.id for one in results.predictions(first, [dataset])})
    if not pairs:
        return None
    n = sum(map(len, pairs.values()))
    differences = {name: pair[:, 0] - pair[:, 1] for name, pair in pairs.items()}
    low, high = macro_interval(differences, difference_interval)
    mean_1, mean_2 = map(float, np.mean([pair.mean(0) for pair in pairs.values()], axis=0))
    return Comparison(n, asked - n, mean_1, mean_2, low, high)


def comparison_tables(results: Results) -> list[str]:
    """The full method against the other systems of its environment, by main metric and by EM read."""
    texts = []
    for full in (system for system in results.systems if system.method == FULL):
        rivals = [one for one in results.systems if one.method != FULL]
        rivals = [one for one in rivals if one.environment in (full.environment, "")]
        for metric in ("", EXTRACTED):
            compared = {rival: compare_systems(results, full, rival, metric=metric) for rival in rivals}
            metrics = [metric or REPORTED_METRICS[kind][0] for kind in results.kinds.values()]
            label = " and ".join(dict.fromkeys(results.labels.get(name, name) for name in metrics))
            rows = [_row(str(rival), label, one) for rival, one in compared.items()]
            title = f"### {full} (first) against the others (second), all datasets"
            texts += [f"{title}\n\n{markdown_table(HEADER, rows, left=2)}"] if rows else []
    return texts


def _row(rival: str, label: str, one: Comparison | None) -> list[str]:
    if one is None:
        return [rival, label, "0", "–", "–", "–", "no common question"]
    n = f"{one.n} ({one.failed} failed)" if one.failed else str(one.n)
    rates = [f"{100 * one.first:.1f}", f"{100 * one.second:.1f}", one.points]
    return [rival, label, n, *rates, one.verdict]
