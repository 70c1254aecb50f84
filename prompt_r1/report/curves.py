"""Curves of metrics as the numbers of static SVG charts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 172, 40, 331, 9, 151

# Title, explanation, metrics with labels, and what the vertical axis reaches at least.
CURVES: list[tuple[str, str, dict[str, str], float]] = [
    ("Validation EM", "Exactly right answers in greedy games of held-out questions.", {"val/em": ""}, 1),
    ("Reward", "Mean of the sampled games.", {"reward/mean": ""}, 1),
    ("Sampled EM", "Games, and questions with a right game.", {"em": "game", "em/any": "question"}, 1),
    ("Well-formed games", "One action in every turn, and an answer at the end.", {"format": ""}, 1),
    ("Groups without spread, or lost", "Nothing is learned from either.",
     {"groups/no_spread": "without spread", "groups/dropped": "lost"}, 1),
    ("Turns", "At 1, the agent answers without asking.", {"turns": ""}, 1),
    ("KL to the start", "Nats per token, of eq. 17.", {"kl": "mean", "kl_median": "median"}, 0),
    ("Entropy", "Nats per token. Near 0 there is no exploration.", {"entropy": ""}, 0),
    ("Log-probability gap", "Engine against trainer, nats.", {"engine/logprob_gap": ""}, 0),
    ("Calls", "", {"env/paid": "sent", "env/reused": "from the journal", "env/errors": "failed"}, 0),
    ("Seconds of a step", "", {"time/rollout": "rollout", "time/update": "update"}, 0),
]  # fmt: skip

Lines = Sequence[Mapping[str, float]]  # of metrics.jsonl


@dataclass(frozen=True)
class Chart:
    """A chart: its polylines as points in pixels by label, and ticks as pairs of pixels and text."""

    title: str
    about: str
    curves: list[tuple[str, str]]
    steps: list[tuple[float, str]]
    values: list[tuple[float, str]]


def charts_of(lines: Lines) -> list[Chart]:
    """The charts of all metrics that were measured."""
    found = []
    for title, about, names, reach in CURVES:
        points = {label: points_of(lines, name) for name, label in names.items()}
        curves = {label: of_one for label, of_one in points.items() if of_one}
        if curves:
            found.append(_chart(title, about, curves, reach, last=max(line["step"] for line in lines)))
    return found


def points_of(lines: Lines, name: str) -> list[tuple[float, float]]:
    """Step and value wherever a metric was measured."""
    return [(line["step"], line[name]) for line in lines if math.isfinite(line.get(name, math.nan))]


def _chart(
    title: str, about: str, curves: Mapping[str, list[tuple[float, float]]], reach: float, *, last: float
) -> Chart:
    values = [value for points in curves.values() for _, value in points]
    low, high = min(0.0, *values), max(reach, *values)
    high = high if high > low else low + 1

    def x(step: float) -> float:
        return round(LEFT + step / max(last, 1) * (RIGHT - LEFT), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)

    shown = [
        (f"{label} {points[-1][1]:.3g}".strip(), " ".join(f"{x(step)},{y(value)}" for step, value in points))
        for label, points in curves.items()
    ]
    steps = [(x(step), f"{step:g}") for step in (0, max(last, 1))]
    marks = [low, (low + high) / 2, high]
    # Five characters have room: 0.5, 1e-05.
    values_shown = [(y(mark), f"{mark:{'.0e' if 0 < abs(mark) < 1e-3 else '.3g'}}") for mark in marks]
    return Chart(title, about, shown, steps, values_shown)
