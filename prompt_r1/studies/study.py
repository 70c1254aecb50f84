"""Means with intervals over questions and seeds, and the validations of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from prompt_r1.metrics.statistics import seeds_interval, wilson

Line = Mapping[str, float]  # of metrics.jsonl


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
