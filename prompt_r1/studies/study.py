"""A study's plot, table and notes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from prompt_r1.metrics.statistics import seeds_interval, wilson
from prompt_r1.studies.plot import Plot, Point

Line = Mapping[str, float]  # of metrics.jsonl


@dataclass(frozen=True)
class Study:
    """One of the results of `python -m prompt_r1.studies`, written as NAME.svg and NAME.md."""

    name: str
    claim: str  # the proposition, in the paper's words
    plot: Plot
    table: str  # Markdown
    notes: Sequence[str]

    def markdown(self) -> str:
        """The claim, the plot, the table and how the numbers were measured."""
        title = self.plot.title
        notes = "\n".join(f"- {note}" for note in self.notes)
        return f"# {title}\n\n> {self.claim}\n\n![{title}]({self.name}.svg)\n\n{self.table}\n\n{notes}\n"


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
