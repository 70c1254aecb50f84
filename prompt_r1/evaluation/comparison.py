"""Compare two systems on the same questions.

Pairs are formed by question, for each dataset and pooled over all of them with equal weights: the mean
difference with a bootstrap interval (10,000 resamples), an exact McNemar test if all scores are 0 or 1, else
a sign-flip test, and Holm's correction over the datasets. The pooled test weights the questions as the pooled
difference does: with datasets of different sizes it is a sign-flip test.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prompt_r1.cli.fitted_table import fitted_table
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import LABELS, REPORTED_METRICS, Results, score_predictions
from prompt_r1.evaluation.predictions import Prediction, System, read_predictions
from prompt_r1.metrics.statistics import (
    bounds_text,
    difference_interval,
    holm,
    macro_interval,
    mcnemar,
    sign_flip,
)

POOLED = "pooled"
Floats = NDArray[np.float64]
Side = tuple[Results, System]
Score = Callable[[Sequence[Prediction]], Results]


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
        return f"{100 * self.difference:+.1f} {bounds_text(100 * self.low, 100 * self.high, '+.1f')}"

    @property
    def questions(self) -> str:
        """How many questions were compared, and how many failed."""
        return f"{self.n} ({self.failed} failed)" if self.failed else str(self.n)

    @property
    def corrected_p(self) -> float:
        """p, with Holm's correction where there is one."""
        return self.p if self.p_holm is None else self.p_holm

    @property
    def verdict(self) -> str:
        """Significant, or the bound of the difference in points that the interval leaves open."""
        if not isfinite(self.high):
            return "too few questions"
        if self.corrected_p < 0.05:
            return "significant"
        return f"within ±{100 * min(1.0, max(abs(self.low), abs(self.high))):.1f}"


@dataclass(frozen=True)
class _Pairs:
    """The scores of two systems on the same questions of a dataset."""

    metric: str
    first: Floats
    second: Floats
    failed: int


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
    n = sum(len(pair.first) for pair in pairs.values())
    share = {dataset: n / (len(pairs) * len(pair.first)) for dataset, pair in pairs.items()}
    first = np.concatenate([share[dataset] * pair.first for dataset, pair in pairs.items()])
    second = np.concatenate([share[dataset] * pair.second for dataset, pair in pairs.items()])
    differences = {dataset: pair.first - pair.second for dataset, pair in pairs.items()}
    low, high = macro_interval(differences, difference_interval)
    binary = bool(np.isin([first, second], (0, 1)).all())
    return Comparison(
        name,
        metric,
        n,
        sum(pair.failed for pair in pairs.values()),
        first=float(first.mean()),
        second=float(second.mean()),
        low=low,
        high=high,
        test="McNemar" if binary else "sign flip",
        p=(mcnemar if binary else sign_flip)(first, second),
        p_holm=None,
    )


def comparison_table(comparisons: Sequence[Comparison], *, row_heading: str = "dataset") -> str:
    """A Markdown table with a row for each comparison; rates in percent."""
    header = [row_heading, "metric", "n", "first", "second", "difference [95 %]", "test", "p", "p (Holm)"]
    rows = []
    for one in comparisons:
        metric, rates = LABELS.get(one.metric, one.metric), _rates(one)
        p_holm = "" if one.p_holm is None else p_text(one.p_holm)
        row = [one.dataset, metric, one.questions, *rates, one.points, one.test, p_text(one.p), p_holm]
        rows.append([*row, one.verdict])
    return markdown_table([*header, "verdict"], rows, left=2)


def printed_comparisons(full: System, pooled: Sequence[Comparison]) -> str:
    """The difference of a system to each other one, in points; `dataset` of each names the other system."""
    rows = [[one.dataset, str(one.n), one.points, p_text(one.corrected_p), one.verdict] for one in pooled]
    return fitted_table([f"{full} against", "n", "points [95 %]", "p", "verdict"], rows, drop=["n", "p"])


def printed_pair(comparisons: Sequence[Comparison], label: str) -> str:
    """The differences of system A to system B by one metric: a row for each dataset, and the pooled one."""
    rows = []
    for one in comparisons:
        p = p_text(one.corrected_p)
        rows.append([one.dataset, one.questions, *_rates(one), one.points, p, one.verdict])
    return fitted_table([label, "n", "A", "B", "A - B [95 %]", "p", "verdict"], rows, drop=["p", "n"])


def _rates(one: Comparison) -> list[str]:
    """The rates of both systems, in percent."""
    return [f"{100 * one.first:.1f}", f"{100 * one.second:.1f}"]


def p_text(p: float) -> str:
    """A p-value for a table: 0.012, or 3e-05."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def compare_files(first: str, second: str, *, score: Score = score_predictions) -> str:
    """Two systems, given as FILE or FILE:METHOD[:ENV[:AGENT]], compared by every metric: text for a terminal.

    Raises UsageError if a name does not select exactly one system, or if the questions differ.
    """
    predictions = [_select(first), _select(second)]
    check_pairs(predictions[0], predictions[1], names=(first, second))
    side_a, side_b = ((score(side), side[0].system) for side in predictions)
    parts = [f"A: {side_a[1]}\nB: {side_b[1]}"]
    for metric, label in side_a[0].labels.items():
        comparisons = compare_systems(side_a, side_b, metric=metric)
        if comparisons:
            parts.append(printed_pair(comparisons, label))
    parts.append(printed_pair(compare_systems(side_a, side_b)[-1:], "main metrics"))
    parts.append(
        "Rates in percent. p of each dataset with Holm's correction: McNemar's test where\n"
        "answers are right or wrong, otherwise a sign-flip test."
    )
    return "\n\n".join(parts)


def _select(text: str) -> list[Prediction]:
    """The predictions of the system that FILE or FILE:METHOD[:ENV[:AGENT]] names."""
    name, _, wanted = (text, "", "") if Path(text).exists() else text.partition(":")
    predictions = read_predictions(Path(name))
    names = {one.system: _selector(one.system) for one in predictions}
    chosen = [system for system in names if not wanted or f"{names[system]}:".startswith(f"{wanted}:")]
    if len(chosen) != 1:
        choices = ", ".join(f"{name}:{selector}" for selector in names.values())
        raise UsageError(f"--compare {text} names {len(chosen)} systems; choose one of {choices}")
    return [one for one in predictions if one.system == chosen[0]]


def _selector(system: System) -> str:
    """The name of a system for --compare."""
    return ":".join((system.method, system.environment, system.agent)).rstrip(":")


def check_pairs(first: Sequence[Prediction], second: Sequence[Prediction], names: tuple[str, str]) -> None:
    """Raise UsageError unless both answer the same questions, with the same gold answers."""
    sides = [
        {(one.question.dataset, one.question.id): one.question for one in predictions}
        for predictions in (first, second)
    ]
    for name, given, wanted in ((names[1], sides[1], sides[0]), (names[0], sides[0], sides[1])):
        missing = sorted(set(wanted) - set(given))
        if missing:
            dataset, identity = missing[0]
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            raise UsageError(
                f"{name} has no answer to question {identity!r} of {dataset}{more}: only runs on the same "
                "questions can be compared"
            )
    for (dataset, identity), one in sides[0].items():
        other = sides[1][dataset, identity]
        if (one.text, one.answers) != (other.text, other.answers):
            raise UsageError(
                f"question {identity!r} of {dataset} has a different text or gold answers in {names[1]} than "
                f"in {names[0]}: only runs on the same data can be compared"
            )
