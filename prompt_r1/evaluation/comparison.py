"""Compare two systems on the same questions.

Pairs are formed by question, for each dataset and pooled over all of them with equal weights: the mean
difference with a bootstrap interval (10,000 resamples), an exact McNemar test if all scores are 0 or 1, else
a sign-flip test, and Holm's correction over the datasets. The pooled test weights the questions as the pooled
difference does: with datasets of different sizes it is a sign-flip test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from prompt_r1.cli.tables import markdown_table
from prompt_r1.evaluation.aggregate import REPORTED_METRICS, Results
from prompt_r1.evaluation.predictions import System
from prompt_r1.metrics.statistics import (
    bounds_text,
    difference_interval,
    holm,
    macro_interval,
    mcnemar,
    sign_flip,
)

POOLED = "pooled"
HEADER = ("metric", "n", "first", "second", "difference [95 %]", "test", "p", "p (Holm)", "verdict")


@dataclass(frozen=True)
class Comparison:
    """First against second system on one dataset, or pooled over several; rates from 0 to 1."""

    dataset: str
    metric: str
    n: int  # questions that both answered
    failed: int  # questions for which a call of either system failed
    first: float
    second: float
    low: float  # 95 % interval of first - second
    high: float
    test: str
    p: float
    p_holm: float | None = None  # corrected over several comparisons

    @property
    def points(self) -> str:
        """The difference in points, with its interval: +1.2 [-0.3, +2.7]."""
        interval = bounds_text(100 * self.low, 100 * self.high, "+.1f")
        return f"{100 * (self.first - self.second):+.1f} {interval}"

    @property
    def verdict(self) -> str:
        """Significant, or the bound of the difference in points that the interval leaves open."""
        if not isfinite(self.high):
            return "too few questions"
        if (self.p if self.p_holm is None else self.p_holm) < 0.05:
            return "significant"
        return f"within ±{100 * min(1.0, max(abs(self.low), abs(self.high))):.1f}"


def compare_systems(results: Results, first: System, second: System, *, metric: str = "") -> list[Comparison]:
    """Compare two systems on each dataset that has the metric and, if there are several, pooled.

    Without a `metric`, each dataset is compared by the main metric of its kind.
    """
    metrics = {name: metric or REPORTED_METRICS[kind][0] for name, kind in results.kinds.items()}
    both = {
        name: wanted
        for name, wanted in metrics.items()
        if results.scores(first, name, wanted).keys() & results.scores(second, name, wanted).keys()
    }
    compared = [_compare(results, first, second, {name: wanted}) for name, wanted in both.items()]
    if len(compared) < 2:
        return with_holm(compared)
    pooled = _compare(results, first, second, both)
    return [*with_holm(compared), replace(pooled, dataset=POOLED, metric=metric or "main")]


def with_holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with p values corrected over all of them."""
    corrected = holm([one.p for one in comparisons])
    return [replace(one, p_holm=p) for one, p in zip(comparisons, corrected, strict=True)]


def _compare(results: Results, first: System, second: System, metrics: dict[str, str]) -> Comparison:
    """Compare on one dataset, or pooled over several with equal weights. `metrics`: dataset → its metric."""
    pairs, asked = {}, 0
    for dataset, metric in metrics.items():
        scores_1, scores_2 = (results.scores(system, dataset, metric) for system in (first, second))
        pairs[dataset] = np.array([(scores_1[name], scores_2[name]) for name in scores_1 if name in scores_2])
        asked += len({one.question.id for one in results.predictions(first, [dataset])})
    n = sum(map(len, pairs.values()))
    weighted = np.concatenate([n / (len(pairs) * len(pair)) * pair for pair in pairs.values()])  # (n, 2)
    low, high = macro_interval(
        {name: pair[:, 0] - pair[:, 1] for name, pair in pairs.items()}, difference_interval
    )
    binary = bool(np.isin(weighted, (0, 1)).all())
    dataset, metric = next(iter(metrics.items()))
    return Comparison(
        dataset,
        metric,
        n,
        failed=asked - n,
        first=float(weighted[:, 0].mean()),
        second=float(weighted[:, 1].mean()),
        low=low,
        high=high,
        test="McNemar" if binary else "sign flip",
        p=(mcnemar if binary else sign_flip)(weighted[:, 0], weighted[:, 1]),
    )


def comparison_table(results: Results, heading: str, comparisons: dict[str, Comparison]) -> str:
    """A Markdown table with a row for each comparison, by the first cell of the row; rates in percent."""
    rows = []
    for label, one in comparisons.items():
        n = f"{one.n} ({one.failed} failed)" if one.failed else str(one.n)
        rates = [f"{100 * one.first:.1f}", f"{100 * one.second:.1f}", one.points]
        p_values = [p_text(one.p), "" if one.p_holm is None else p_text(one.p_holm)]
        metric = results.labels.get(one.metric, one.metric)
        rows.append([label, metric, n, *rates, one.test, *p_values, one.verdict])
    return markdown_table([heading, *HEADER], rows, left=2)


def p_text(p: float) -> str:
    """A p-value for a table: 0.012, or 3e-05."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
