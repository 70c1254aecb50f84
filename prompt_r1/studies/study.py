"""The result of a study: a plot, a Markdown table and notes; rates with their intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prompt_r1.metrics.statistics import wilson
from prompt_r1.report.svg import Plot, Point

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


def rate_point(x: float, right: float, n: int) -> Point:
    """The share of right answers, with Wilson's interval."""
    return Point(x, right / n, *wilson(right, n), n)


def validations(run: Sequence[Line]) -> dict[int, Line]:
    """The lines with a validation, by step."""
    return {int(line["step"]): line for line in run if "val/em" in line}


def pooled_validations(runs: Sequence[Sequence[Line]]) -> list[Point]:
    """EM of all runs together at each step at which all were validated."""
    validated = [validations(run) for run in runs]
    points = []
    for step in sorted(set.intersection(*map(set, validated))):
        lines = [found[step] for found in validated]
        right = sum(round(line["val/em"] * line["val/n"]) for line in lines)
        points.append(rate_point(step, right, int(sum(line["val/n"] for line in lines))))
    return points
