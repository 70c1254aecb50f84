"""The charts of a run's metrics, as points in pixels. page.html draws them as static SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Lines = Sequence[Mapping[str, float]]  # the lines of metrics.jsonl
Point = tuple[float, float]


@dataclass(frozen=True)
class Plan:
    """A chart to draw."""

    title: str
    about: str
    metrics: Mapping[str, str]  # metric → label of its curve
    top: float = 0.0  # the axis ends here, or higher if a value is higher
    has_markers: bool = False  # whether each point is marked, because few steps have the metric


PLANS = (
    Plan(
        "Validation EM",
        "Exactly right answers in greedy games of held-out questions.",
        {"val/em": ""},
        top=1.0,
        has_markers=True,
    ),
    Plan("Reward", "Mean of the sampled games.", {"reward/mean": ""}, top=1.0),
    Plan(
        "Sampled EM", "Games, and questions with a right game.", {"em": "game", "em/any": "question"}, top=1.0
    ),
    Plan("Well-formed games", "One action in every turn, and an answer at the end.", {"format": ""}, top=1.0),
    Plan(
        "Groups without spread, or lost",
        "Nothing is learned from either.",
        {"groups/no_spread": "without spread", "groups/dropped": "lost"},
        top=1.0,
    ),
    Plan("Turns", "At 1, the agent answers without asking.", {"turns": ""}, top=1.0),
    Plan("KL to the start", "Nats per token, of eq. 17.", {"kl": "mean", "kl_median": "median"}),
    Plan("Entropy", "Nats per token. Near 0 there is no exploration.", {"entropy": ""}),
    Plan("Log-probability gap", "Engine against trainer, nats.", {"engine/logprob_gap": ""}),
    Plan("Calls", "", {"env/paid": "sent", "env/reused": "from the journal", "env/errors": "failed"}),
    Plan("Seconds of a step", "", {"time/rollout": "rollout", "time/update": "update"}),
)
LEFT, RIGHT, TOP, BOTTOM = 40, 331, 9, 151  # the ends of the axes in page.html, in pixels
# The end of an axis begins with one of these numbers. So its middle is a short number too.
TOP_DIGITS = (1, 2, 4, 6, 8, 10)


@dataclass(frozen=True)
class Curve:
    """A metric in a chart: its label with the last value, and its points in pixels."""

    label: str
    points: list[Point]

    @property
    def polyline(self) -> str:
        """The points as the attribute `points` of an SVG polyline."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass(frozen=True)
class Chart:
    """A chart of page.html: its curves, and the texts beside its axes."""

    title: str
    about: str
    curves: list[Curve]
    has_markers: bool
    last_step: str
    values: list[str]  # the ticks at the bottom, in the middle and at the top


def charts_of(lines: Lines) -> list[Chart]:
    """The charts of all metrics that were measured."""
    last_step = max([1.0, *(line["step"] for line in lines)])
    charts = []
    for plan in PLANS:
        measured = {label: points_of(lines, metric) for metric, label in plan.metrics.items()}
        values = [value for points in measured.values() for _, value in points]
        if not values:
            continue
        lowest = min(values)
        low = -axis_end(-lowest) if lowest < 0 else 0.0
        high = max(plan.top, axis_end(max(values))) or 1.0
        curves = []
        for label, points in measured.items():
            if points:
                last = f"{points[-1][1]:.3g}"
                pixels = [_pixel(point, last_step, low, high) for point in points]
                curves.append(Curve(f"{label}: {last}" if label else last, pixels))
        ticks = [f"{value:g}" for value in (low, (low + high) / 2, high)]
        charts.append(Chart(plan.title, plan.about, curves, plan.has_markers, f"{last_step:g}", ticks))
    return charts


def axis_end(value: float) -> float:
    """The upper end of an axis whose highest value is `value`; 0 for a value below 0.

    It is the least number at or above the value that is a digit of TOP_DIGITS times a power of ten.
    """
    if value <= 0:
        return 0.0
    power = math.floor(math.log10(value))
    for digit in TOP_DIGITS:
        end = float(f"{digit}e{power}")
        if value <= end:
            return end
    return float(f"1e{power + 1}")


def points_of(lines: Lines, name: str) -> list[Point]:
    """The step and the value of a metric in each line that has it, where it is finite."""
    points = []
    for line in lines:
        if name in line and math.isfinite(line[name]):
            points.append((line["step"], line[name]))
    return points


def _pixel(point: Point, last_step: float, low: float, high: float) -> Point:
    step, value = point
    x = LEFT + step / last_step * (RIGHT - LEFT)
    y = BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)
    return x, y
