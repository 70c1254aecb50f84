"""Curves of metrics as the numbers of static SVG charts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prompt_r1.report.verdict import Columns

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 172, 40, 331, 9, 151
FEW = 12  # up to this many points are drawn as dots too

# Title, explanation, metrics with labels, and the ends of the vertical axis (None: those of the values).
CURVES: list[tuple[str, str, dict[str, str], tuple[float | None, float | None]]] = [
    ("Validation EM", "Exactly right answers in greedy games of held-out questions.", {"val/em": ""}, (0, 1)),
    ("Reward", "Mean of the sampled games.", {"reward/mean": ""}, (None, 1)),
    ("Sampled EM", "Games, and questions with a right game.", {"em": "game", "em/any": "question"}, (0, 1)),
    ("Well-formed games", "One action in every turn, and an answer at the end.", {"format": ""}, (0, 1)),
    ("Groups without spread", "Nothing is learned from them.", {"groups/no_spread": ""}, (0, 1)),
    ("Lost groups", "Dropped because calls of the environment failed.", {"groups/dropped": ""}, (0, 1)),
    ("Turns", "At 1, the agent answers without asking.", {"turns": ""}, (1, None)),
    ("KL to the start", "Nats per token, of eq. 17.", {"kl": "mean", "kl_median": "median"}, (0, None)),
    ("Entropy", "Nats per token. Near 0 there is no exploration.", {"entropy": ""}, (0, None)),
    ("Log-probability gap", "Engine against trainer, nats.", {"engine/logprob_gap": ""}, (0, None)),
    ("Seconds of a step", "", {"time/rollout": "rollout", "time/update": "update"}, (0, None)),
    ("Calls", "", {"env/paid": "sent", "env/reused": "from the journal", "env/errors": "failed"}, (0, None)),
    ("Dollars", "Total so far.", {"env/usd": "", "env/lost_usd": "estimated, for lost attempts"}, (0, None)),
]  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A polyline, its dots and the polygon of its interval, in pixels."""

    label: str
    points: str
    dots: list[tuple[float, float]]
    band: str
    end: str  # the last value


@dataclass(frozen=True)
class Chart:
    """A chart: ticks are pairs of pixels and text."""

    title: str
    about: str
    lines: list[Line]
    steps: list[tuple[float, str]]
    values: list[tuple[float, str]]


def charts_of(metrics: Columns) -> list[Chart]:
    """The charts of all metrics that were measured."""
    steps = [step for step in metrics.get("step", ()) if step is not None]
    if not steps:
        return []
    across = (min(steps), max(*steps, min(steps) + 1))
    charts = []
    for title, about, names, ends in CURVES:
        found = {name: label for name, label in names.items() if _points(metrics, name)}
        if found:
            charts.append(_chart(title, about, metrics, found, ends, across))
    return charts


def _points(metrics: Columns, name: str) -> list[tuple[float, float]]:
    """Step and value wherever a metric was measured."""
    pairs = zip(metrics.get("step", ()), metrics.get(name, ()), strict=False)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _chart(
    title: str,
    about: str,
    metrics: Columns,
    names: dict[str, str],
    ends: tuple[float | None, float | None],
    across: tuple[float, float],
) -> Chart:
    parts = [name + end for name in names for end in ("", "_low", "_high")]
    values = [value for part in parts for _, value in _points(metrics, part)]
    low = min([*values, *(end for end in ends[:1] if end is not None)])
    high = max([*values, *(end for end in ends[1:] if end is not None)])
    high = high if high > low else low + (abs(low) or 1)

    def x(step: float) -> float:
        return round(LEFT + (step - across[0]) / (across[1] - across[0]) * (RIGHT - LEFT), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(step)},{y(value)}" for step, value in points)

    lines = []
    for name, label in names.items():
        points = _points(metrics, name)
        band = [*_points(metrics, f"{name}_low"), *reversed(_points(metrics, f"{name}_high"))]
        dots = [(x(step), y(value)) for step, value in points] if len(points) <= FEW else []
        lines.append(Line(label, path(points), dots, path(band), f"{points[-1][1]:.3g}"))
    marks = [(x(tick), f"{tick:g}") for tick in _ticks(*across, 5) if tick == int(tick)]
    return Chart(title, about, lines, marks, [(y(tick), f"{tick:.4g}") for tick in _ticks(low, high, 4)])


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from low to high, in at most `count` steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
