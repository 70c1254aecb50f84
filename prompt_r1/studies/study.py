"""The result of a study: a plot, a Markdown table and notes."""

from collections.abc import Sequence
from dataclasses import dataclass

from prompt_r1.metrics.statistics import wilson
from prompt_r1.report.svg import Plot, Point


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


def rate_point(x: float, scores: Sequence[float]) -> Point:
    """The mean of scores that are all 0 or 1, with Wilson's interval."""
    return Point(x, sum(scores) / len(scores), *wilson(sum(scores), len(scores)), len(scores))
