"""The curves of a report: which metrics they show, and where their points are. page.html draws them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Lines = Sequence[Mapping[str, float]]  # the lines of metrics.jsonl
Point = tuple[float, float]
WIDTH, HEIGHT = 291, 142  # pixels of a chart between its axes


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
        "Groups without spread, or dropped",
        "Nothing is learned from either.",
        {"groups/no_spread": "without spread", "groups/dropped": "dropped"},
        top=1.0,
    ),
    Plan("Turns", "At 1, the agent answers without asking.", {"turns": ""}, top=1.0),
    Plan("KL to the start", "Nats per token, of eq. 17.", {"kl": "mean", "kl_median": "median"}),
    Plan("Entropy", "Nats per token. Near 0 there is no exploration.", {"entropy": ""}),
    Plan("Log-probability gap", "Engine against trainer, nats.", {"engine/logprob_gap": ""}),
    Plan("Calls", "", {"env/paid": "sent", "env/reused": "from the journal", "env/errors": "failed"}),
    Plan("Seconds of a step", "", {"time/rollout": "rollout", "time/update": "update"}),
)
# The end of an axis begins with one of these numbers. So its middle is a short number too.
TOP_DIGITS = (1, 2, 4, 6, 8, 10)


@dataclass(frozen=True)
class Chart:
    """A chart of page.html: its curves, and the numbers beside its axes."""

    plan: Plan
    # The label of each curve, with its last value, and its points: pixels from the left and from the top.
    curves: dict[str, list[Point]]
    last_step: str
    ticks: list[str]  # the numbers at the top, in the middle and at the bottom


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
        curves = {}
        for label, points in measured.items():
            if points:
                last = f"{points[-1][1]:.3g}"
                shown = f"{label}: {last}" if label else last
                curves[shown] = [
                    (step / last_step * WIDTH, (high - value) / (high - low) * HEIGHT)
                    for step, value in points
                ]
        ticks = [f"{value:g}" for value in (high, (low + high) / 2, low)]
        charts.append(Chart(plan, curves, f"{last_step:g}", ticks))
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
