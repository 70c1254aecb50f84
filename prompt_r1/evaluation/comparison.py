"""Compare two systems on the same questions, with significance tests.

Pairs are formed by question, for each dataset and pooled over all of them with equal weights: the mean
difference with a bootstrap interval (10,000 resamples), an exact McNemar test if all scores are 0 or 1, else
a sign-flip test, and Holm's correction over the datasets. The pooled test weights the questions as the pooled
difference does: with datasets of different sizes it is a sign-flip test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import LABELS, REPORTED_METRICS, Results
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.metrics.statistics import (
    holm,
    macro_interval,
    mcnemar,
    paired_bootstrap,
    sign_flip,
)
from prompt_r1.types import Question

POOLED = "pooled"
Floats = NDArray[np.float64]
Side = tuple[Results, System]


@dataclass(frozen=True)
class Comparison:
    """First against second system on one dataset, or pooled over all; rates from 0 to 1."""

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
    p_holm: float | None  # corrected over the datasets; None for the pooled comparison

    @property
    def difference(self) -> float:
        return self.first - self.second

    @property
    def points(self) -> str:
        """The difference in points, with its interval: +1.2 [-0.3, +2.7]."""
        return f"{100 * self.difference:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"

    @property
    def questions(self) -> str:
        """How many questions were compared, and how many failed."""
        return f"{self.n} ({self.failed} failed)" if self.failed else str(self.n)

    @property
    def verdict(self) -> str:
        """Whether the difference is significant; otherwise how large a difference the interval excludes."""
        return "significant" if self._is_significant else f"no difference beyond {self._bound} shown"

    @property
    def short_verdict(self) -> str:
        """The verdict in a word or two: significant, or the bound of the difference in points."""
        return "significant" if self._is_significant else f"within {self._bound}"

    @property
    def corrected_p(self) -> float:
        """p, with Holm's correction where there is one."""
        return self.p if self.p_holm is None else self.p_holm

    @property
    def _is_significant(self) -> bool:
        return self.corrected_p < 0.05

    @property
    def _bound(self) -> str:
        return f"±{100 * min(1.0, max(abs(self.low), abs(self.high))):.1f}"


@dataclass(frozen=True)
class _Pairs:
    """The scores of two systems on the same questions of a dataset."""

    metric: str
    first: Floats
    second: Floats
    failed: int


def check_pairs(first: Sequence[Prediction], second: Sequence[Prediction], names: tuple[str, str]) -> None:
    """Raise UsageError unless both answer the same questions, with the same gold answers."""
    questions_1, questions_2 = (
        {(one.question.dataset, one.question.id): one.question for one in predictions}
        for predictions in (first, second)
    )
    _check_missing(questions_1, questions_2, names[1])
    _check_missing(questions_2, questions_1, names[0])
    for (dataset, identity), one in questions_1.items():
        other = questions_2[dataset, identity]
        if (one.text, one.answers) != (other.text, other.answers):
            raise UsageError(
                f"question {identity!r} of {dataset} has a different text or gold answers in {names[1]} than "
                f"in {names[0]}: only runs on the same data can be compared"
            )


def _check_missing(
    wanted: Mapping[tuple[str, str], Question], given: Mapping[tuple[str, str], Question], name: str
) -> None:
    missing = sorted(set(wanted) - set(given))
    if missing:
        dataset, identity = missing[0]
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UsageError(
            f"{name} has no answer to question {identity!r} of {dataset}{more}: only runs on the same "
            "questions can be compared"
        )


def compare_systems(first: Side, second: Side, *, metric: str = "") -> list[Comparison]:
    """Compare two systems on each dataset that has the metric and, if there are several, pooled.

    Without a `metric`, each dataset is compared by the main metric of its kind.
    """
    pairs: dict[str, _Pairs] = {}
    for dataset, kind in first[0].kinds.items():
        if kind == "text" and metric in ("em", "sm"):
            continue  # no long text equals or contains another
        found = _pair(first, second, dataset, metric or REPORTED_METRICS[kind][0])
        if found is not None:
            pairs[dataset] = found
    comparisons = [_compare(dataset, pair.metric, {dataset: pair}) for dataset, pair in pairs.items()]
    comparisons = with_holm(comparisons)
    if len(comparisons) > 1:
        comparisons.append(_compare(POOLED, metric or "main", pairs))
    return comparisons


def with_holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with p values corrected over all of them."""
    corrected = holm([one.p for one in comparisons])
    return [replace(one, p_holm=p) for one, p in zip(comparisons, corrected, strict=True)]


def _pair(first: Side, second: Side, dataset: str, metric: str) -> _Pairs | None:
    """The scores on the questions that both systems answered; None if there are none."""
    scores_1, scores_2 = (results.scores(system, dataset, metric) for results, system in (first, second))
    both = [identity for identity in scores_1 if identity in scores_2]
    if not both:
        return None
    asked = {one.question.id for one in first[0].predictions(first[1], [dataset])}
    return _Pairs(
        metric,
        np.array([scores_1[identity] for identity in both]),
        np.array([scores_2[identity] for identity in both]),
        failed=len(asked) - len(both),
    )


def _compare(name: str, metric: str, pairs: Mapping[str, _Pairs]) -> Comparison:
    """Compare on one dataset, or pooled over several with equal weights."""
    first = np.concatenate([pair.first for pair in pairs.values()])
    second = np.concatenate([pair.second for pair in pairs.values()])
    n = len(first)
    weights = np.concatenate(
        [np.full(len(pair.first), n / (len(pairs) * len(pair.first))) for pair in pairs.values()]
    )
    weighted_1, weighted_2 = weights * first, weights * second
    if len(pairs) > 1:
        low, high = macro_interval({dataset: pair.first - pair.second for dataset, pair in pairs.items()})
    else:
        interval = paired_bootstrap(weighted_1, weighted_2)
        low, high = interval.low, interval.high
    binary = bool(np.isin([weighted_1, weighted_2], (0, 1)).all())
    return Comparison(
        name,
        metric,
        n,
        sum(pair.failed for pair in pairs.values()),
        first=float(weighted_1.mean()),
        second=float(weighted_2.mean()),
        low=low,
        high=high,
        test="McNemar" if binary else "sign flip",
        p=(mcnemar if binary else sign_flip)(weighted_1, weighted_2),
        p_holm=None,
    )


def comparison_table(
    comparisons: Sequence[Comparison], first: str, second: str, *, row_heading: str = "dataset"
) -> str:
    """A Markdown table with a row for each comparison; rates in percent."""
    header = [row_heading, "metric", "n", first, second, "difference [95 %]", "test", "p", "p (Holm)"]
    header.append("verdict")
    rows = []
    for one in comparisons:
        rows.append(
            [
                one.dataset,
                LABELS.get(one.metric, one.metric),
                one.questions,
                f"{100 * one.first:.1f}",
                f"{100 * one.second:.1f}",
                one.points,
                one.test,
                p_text(one.p),
                "" if one.p_holm is None else p_text(one.p_holm),
                one.verdict,
            ]
        )
    return markdown_table(header, rows, left=2)


def p_text(p: float) -> str:
    """A p-value for a table: 0.012, or 3e-05."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
