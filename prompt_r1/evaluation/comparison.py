"""Two systems on the same questions: which differences are real?

Paired by question, for each dataset and pooled (all datasets weigh the same): the mean difference with a
bootstrap interval (10,000), an exact McNemar test where all scores are 0 or 1, else a sign-flip test, Holm's
correction over the datasets. A difference below what so many questions can show (80 % power) is marked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import FIGURES, LABELS, Scores
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.evaluation.tables import markdown_row
from prompt_r1.metrics.statistics import (
    holm,
    macro_interval,
    mcnemar,
    paired_bootstrap,
    sign_flip,
    smallest_detectable,
)

POOLED = "pooled"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """First minus second system on one dataset, or on all; rates from 0 to 1."""

    dataset: str
    metric: str
    n: int  # questions that both answered
    lost: int  # questions on which a call of either failed
    first: float
    second: float
    low: float  # 95 % interval of first - second
    high: float
    test: str
    p: float
    p_holm: float | None  # corrected over the datasets; None for the pooled line
    detectable: float  # smallest true difference that n questions show with 80 % power

    @property
    def difference(self) -> float:
        return self.first - self.second

    @property
    def too_small(self) -> bool:
        return abs(self.difference) < self.detectable


def check_pairs(first: Sequence[Prediction], second: Sequence[Prediction], names: tuple[str, str]) -> None:
    """Raise UsageError unless both answer the same questions, with the same gold answers."""
    questions = [
        {(one.dataset, one.id): (one.question, one.answers) for one in predictions}
        for predictions in (first, second)
    ]
    left, right = questions
    for mine, other, name in [(left, right, names[1]), (right, left, names[0])]:
        missing = sorted(set(mine) - set(other))
        if missing:
            dataset, identity = missing[0]
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            raise UsageError(f"{name} has no answer to question {identity!r} of {dataset}{more}: only runs "
                             "on the same questions can be compared")  # fmt: skip
    for key, text in questions[0].items():
        if questions[1][key] != text:
            raise UsageError(f"question {key[1]!r} of {key[0]} has other words or gold answers in {names[1]} "
                             f"than in {names[0]}: only runs on the same data can be compared")  # fmt: skip


def compare(
    first: tuple[Scores, System], second: tuple[Scores, System], *, metric: str = "", seed: int = 0
) -> list[Difference]:
    """A Difference for each dataset that has the metric, and the pooled one when there are several.

    Without a `metric`, each dataset is compared by the main one of its kind.
    """
    scores, kinds = first[0], first[0].kinds
    metrics = {name: metric or FIGURES[kind][0] for name, kind in kinds.items()}
    if metric in ("em", "sm"):  # long texts are never equal, and never within each other
        metrics = {name: metric for name, kind in kinds.items() if kind != "text"}
    pairs: dict[str, tuple[Floats, Floats]] = {}
    lost: dict[str, int] = {}
    for name, wanted in metrics.items():
        ours, theirs = scores.values(first[1], name, wanted), second[0].values(second[1], name, wanted)
        both = [identity for identity in ours if identity in theirs]
        if both:
            pairs[name] = np.array([ours[i] for i in both]), np.array([theirs[i] for i in both])
            asked = {one.prediction.id for one in scores.groups[first[1], name]}
            lost[name] = len(asked) - len(both)
    found = [_difference(name, metrics[name], {name: pair}, lost[name], seed) for name, pair in pairs.items()]
    corrected = holm([one.p for one in found])
    found = [replace(one, p_holm=p) for one, p in zip(found, corrected, strict=True)]
    if len(found) > 1:
        label = metric if metric else "main"
        found.append(_difference(POOLED, label, pairs, sum(lost.values()), seed))
    return found


def _difference(
    name: str, metric: str, pairs: Mapping[str, tuple[Floats, Floats]], lost: int, seed: int
) -> Difference:
    """Of one dataset, or pooled over several, each with the same weight."""
    n = sum(len(ours) for ours, _ in pairs.values())
    weights = {dataset: n / (len(pairs) * len(ours)) for dataset, (ours, _) in pairs.items()}
    ours, theirs = (
        np.concatenate([weights[dataset] * pair[side] for dataset, pair in pairs.items()]) for side in (0, 1)
    )
    raw = [np.concatenate([pair[side] for pair in pairs.values()]) for side in (0, 1)]
    exact = all(np.isin(values, (0, 1)).all() for values in raw)
    if len(pairs) > 1:
        low, high = macro_interval({dataset: a - b for dataset, (a, b) in pairs.items()}, seed=seed)
    else:
        interval = paired_bootstrap(ours, theirs, seed=seed)
        low, high = interval.low, interval.high
    return Difference(
        name,
        metric,
        n,
        lost,
        first=float(ours.mean()),
        second=float(theirs.mean()),
        low=low,
        high=high,
        test="McNemar" if exact else "sign flip",
        p=mcnemar(*raw) if exact else sign_flip(ours, theirs, seed=seed),
        p_holm=None,
        detectable=smallest_detectable(n, float(np.square(ours - theirs).mean())),
    )


def comparison_table(differences: Sequence[Difference], first: str, second: str) -> str:
    """Markdown: a line for each dataset, then the pooled one; rates in percent."""
    heads = [
        "dataset",
        "metric",
        "n",
        first,
        second,
        "difference [95 %]",
        "test",
        "p",
        "p (Holm)",
        "detectable",
        "verdict",
    ]
    lines = [
        markdown_row(heads),
        "|---|---|" + "---:|" * 4 + "---|" + "---:|" * 3 + "---|",
    ]
    for one in differences:
        interval = f"[{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
        places = [
            one.dataset,
            LABELS.get(one.metric, one.metric),
            f"{one.n} ({one.lost} lost)" if one.lost else str(one.n),
            f"{100 * one.first:.1f}",
            f"{100 * one.second:.1f}",
            f"{100 * one.difference:+.1f} {interval}",
            one.test,
            _p_text(one.p),
            "" if one.p_holm is None else _p_text(one.p_holm),
            f"{100 * one.detectable:.1f}",
            verdict(one),
        ]
        lines.append(markdown_row(places))
    return "\n".join(lines)


def verdict(one: Difference) -> str:
    """What may be said of a difference, after Holm's correction."""
    if (one.p if one.p_holm is None else one.p_holm) < 0.05:
        return "real, n too small to size it" if one.too_small else "real"
    return "n too small" if one.too_small else "not shown"


def _p_text(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
