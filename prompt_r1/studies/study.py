"""A study's curves, table and notes; drawn by matplotlib (`pip install '.[plot]'`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING

from prompt_r1.errors import UsageError
from prompt_r1.metrics.statistics import seeds_interval, wilson

if TYPE_CHECKING:  # optional
    from matplotlib.figure import Figure

Line = Mapping[str, float]  # of metrics.jsonl
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

    def __str__(self) -> str:
        """The mean and its interval: 0.953 [0.92, 0.97]."""
        return f"{self.mean:.3f} [{max(0.0, self.low):.2f}, {min(1.0, self.high):.2f}]"


@dataclass(frozen=True)
class Series:
    """The points of a curve in order, and its label. `joined`: what lies between them was measured too."""

    label: str
    points: Sequence[Point]
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Study:
    """One of the results of `python -m prompt_r1.studies`, written as NAME.svg and NAME.md."""

    name: str
    claim: str  # the proposition, in the paper's words
    title: str
    x_label: str
    series: Sequence[Series]  # of EM over x, which begins at 0
    table: str  # Markdown
    notes: Sequence[str]

    def markdown(self) -> str:
        """The claim, the plot, the table and how the numbers were measured."""
        notes = "\n".join(f"- {note}" for note in self.notes)
        plot = f"![{self.title}]({self.name}.svg)"
        return f"# {self.title}\n\n> {self.claim}\n\n{plot}\n\n{self.table}\n\n{notes}\n"


def rate_point(x: float, by_seed: Sequence[Sequence[float]]) -> Point:
    """The mean of the answers' EM over the seeds, with its interval over questions and seeds."""
    scores = [score for answers in by_seed for score in answers]
    means = [fmean(answers) for answers in by_seed]
    low, high = seeds_interval(means, wilson(sum(scores), len(scores)))
    return Point(x, fmean(means), max(0.0, low), min(1.0, high), len(scores))


def validations(run: Sequence[Line]) -> dict[int, Line]:
    """The lines with a validation, by step."""
    return {int(line["step"]): line for line in run if "val/em" in line}


def pooled_validations(runs: Sequence[Sequence[Line]]) -> list[Point]:
    """EM of all runs together at each step at which all were validated."""
    validated = [validations(run) for run in runs]
    points = []
    for step in sorted(set.intersection(*map(set, validated))):
        by_seed = []
        for line in (found[step] for found in validated):
            right, n = round(line["val/em"] * line["val/n"]), int(line["val/n"])
            by_seed.append([1.0] * right + [0.0] * (n - right))
        points.append(rate_point(step, by_seed))
    return points


def check_matplotlib() -> None:
    """Raise UsageError if matplotlib is missing. Call it before long work."""
    if find_spec("matplotlib") is None:
        raise UsageError("the plots need matplotlib: pip install matplotlib")


def figure_of(study: Study) -> "Figure":
    """Draw the curves of a study; intervals end at 0 and 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    width = max((point.x for series in study.series for point in series.points), default=0.0) or 1.0
    for number, series in enumerate(study.series):
        shift = APART * width * (number - (len(study.series) - 1) / 2)
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
    axes.set(title=study.title, xlabel=study.x_label, ylabel="EM", ylim=(-0.02, 1.02))
    axes.grid(axis="y", alpha=0.4)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure
