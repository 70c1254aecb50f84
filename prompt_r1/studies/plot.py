"""Plot means with their intervals by matplotlib (`pip install '.[plot]'`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from prompt_r1.errors import UsageError

if TYPE_CHECKING:  # optional
    from matplotlib.figure import Figure

APART = 0.006  # of the width: between the intervals of two series at the same x
# Wong's colour-blind safe colours. Marker and dashes tell series apart without colours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#56b4e9", "#555555")


@dataclass(frozen=True)
class Point:
    """A mean over `n` questions and its 95 % interval, from 0 to 1."""

    x: float
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Series:
    """The points of a plot in order, and their label. `joined`: what lies between them was measured too."""

    label: str
    points: Sequence[Point]
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Plot:
    """Several series over one x axis, which begins at 0; y runs from 0 to 1."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def rate_text(point: Point) -> str:
    """A mean and its interval: 0.953 [0.92, 0.97]."""
    return f"{point.mean:.3f} [{max(0.0, point.low):.2f}, {min(1.0, point.high):.2f}]"


def check_matplotlib() -> None:
    """Raise UsageError if matplotlib is missing. Call it before long work."""
    if find_spec("matplotlib") is None:
        raise UsageError("the plots need matplotlib: pip install matplotlib")


def figure_of(plot: Plot) -> "Figure":
    """Draw a plot; intervals end at 0 and 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    width = max((point.x for series in plot.series for point in series.points), default=0.0) or 1.0
    for number, series in enumerate(plot.series):
        shift = APART * width * (number - (len(plot.series) - 1) / 2)
        below = [point.mean - max(0.0, point.low) for point in series.points]
        above = [min(1.0, point.high) - point.mean for point in series.points]
        line = "--" if series.dashed else "-"
        axes.errorbar(
            [point.x + shift for point in series.points],
            [point.mean for point in series.points],
            yerr=[below, above],
            label=series.label,
            color=COLOURS[number % len(COLOURS)],
            linestyle=line if series.joined else "none",
            marker="s" if series.dashed else "o",
            markersize=4,
        )
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label, ylim=(-0.02, 1.02))
    axes.grid(axis="y", alpha=0.4)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure
