"""Curves of metrics as the numbers of static SVG charts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEFT, RIGHT, TOP, BOTTOM = 40, 331, 9, 151  # of the axes in page.html, in pixels

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
    """A chart: its polylines as points in pixels by label, and the texts beside its axes."""

    title: str
    about: str
    curves: list[tuple[str, str]]
    last_step: str
    values: list[str]  # at the bottom, in the middle and at the top


def charts_of(lines: Lines) -> list[Chart]:
    """The charts of all metrics that were measured."""
    last_step = max([1.0, *(line["step"] for line in lines)])
    charts = []
    for title, about, names, reach in CURVES:
        points_by_label = {label: points_of(lines, name) for name, label in names.items()}
        values = [value for points in points_by_label.values() for _, value in points]
        if values:
            low, high = min(0.0, *values), max(reach, *values) or 1.0
            curves = [
                (f"{label} {points[-1][1]:.3g}".strip(), _polyline(points, last_step, low, high))
                for label, points in points_by_label.items()
                if points
            ]
            # Five characters have room: 0.5, 1e-05.
            marks = [low, (low + high) / 2, high]
            shown = [f"{mark:{'.0e' if 0 < abs(mark) < 1e-3 else '.3g'}}" for mark in marks]
            charts.append(Chart(title, about, curves, f"{last_step:g}", shown))
    return charts


def points_of(lines: Lines, name: str) -> list[tuple[float, float]]:
    """Step and value wherever a metric was measured."""
    return [(line["step"], line[name]) for line in lines if math.isfinite(line.get(name, math.nan))]


def _polyline(points: Sequence[tuple[float, float]], last_step: float, low: float, high: float) -> str:
    pixels = (
        (LEFT + step / last_step * (RIGHT - LEFT), BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP))
        for step, value in points
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
