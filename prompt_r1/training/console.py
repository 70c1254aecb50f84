"""Console output: a progress line, a row per step, a summary."""

import math
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from tqdm import tqdm

from prompt_r1.cli.command_line import command
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.functions import OBJECT_PREFIX
from prompt_r1.storage.run_log import Log, read_metrics
from prompt_r1.types import ScoredGame

P = ParamSpec("P")
T = TypeVar("T")

TEST_FILE = "test.md"  # in the run folder: the table of the test, which is played last
HEADER_EVERY = 25  # rows


@dataclass(frozen=True)
class Column:
    """A right-aligned column of the table of steps."""

    label: str
    width: int
    text: Callable[[Mapping[str, float]], str]  # of the metrics of a step; "" if it was not measured

    @property
    def header(self) -> str:
        return self.label.rjust(self.width)

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The text of a step under the label."""
        return self.text(metrics).rjust(self.width)


def _number(metric: str, digits: int) -> Callable[[Mapping[str, float]], str]:
    """A metric with so many digits after the decimal point."""
    return lambda metrics: f"{metrics[metric]:.{digits}f}" if metric in metrics else ""


def _as_dollars(usd: float) -> str:
    return f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}"


def _dollars(metrics: Mapping[str, float]) -> str:
    """The dollars that the run has spent on replies so far."""
    return _as_dollars(metrics.get("env/usd", 0.0))


def _lost_dollars(metrics: Mapping[str, float]) -> str:
    """The part of it that is charged for lost attempts; "" if there were none."""
    usd = metrics.get("env/lost_usd", 0.0)
    return _as_dollars(usd) if usd else ""


COLUMNS = (
    Column("step", 4, _number("step", 0)),
    Column("reward", 6, _number("reward/mean", 3)),
    Column("EM", 5, _number("em", 3)),
    Column("format", 6, _number("format", 3)),
    Column("turns", 5, _number("turns", 2)),
    Column("KL", 6, _number("kl", 4)),
)
SPEED = (Column("games/s", 7, _number("games/s", 1)),)
DOLLARS = (Column("spent", 7, _dollars), Column("lost", 8, _lost_dollars))  # in place of the speed
VALIDATION = (
    Column("EM", 5, _number("val/em", 3)),
    Column("reward", 6, _number("val/reward", 3)),
    Column("format", 6, _number("val/format", 3)),
)


def header(*, priced: bool) -> str:
    """The labels above the rows, in 80 columns; `priced` shows dollars in place of the speed."""
    labels = [column.header for column in (*COLUMNS, *(DOLLARS if priced else SPEED))]
    return " ".join([*labels, "| val", *(column.header for column in VALIDATION)])


def row(metrics: Mapping[str, float], *, priced: bool) -> str:
    """One step under `header`; blank where a metric is missing, as in step 0, which only validates."""
    cells = [column.cell(metrics) for column in (*COLUMNS, *(DOLLARS if priced else SPEED))]
    if "val/em" in metrics:
        cells += ["|    ", *(column.cell(metrics) for column in VALIDATION)]
    return " ".join(cells).rstrip()


class Console:
    """The progress line and the rows of one training; `priced` shows dollars."""

    def __init__(self, log: Log, *, steps: int, priced: bool) -> None:
        self._log = log
        self._steps = steps
        self._priced = priced
        self._rows = 0
        self._phase = ""
        self._drawn = 0.0  # monotonic seconds
        self._bar: tqdm | None = None

    @contextmanager
    def bar(self, step: int) -> Iterator[None]:
        """Show the progress line inside, if on a terminal, starting at `step`."""
        self._bar = tqdm(
            total=self._steps,
            initial=max(step, 0),
            disable=True if self._log.quiet else None,  # None: only on a terminal
            leave=False,
            dynamic_ncols=True,
            bar_format="{desc} step {n_fmt}/{total_fmt} |{bar:6}| {remaining} left",
        )
        try:
            yield
        finally:
            self._bar.close()
            self._bar = None

    def at(self, step: int) -> None:
        """Move the progress line to `step`."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def phase(self, name: str) -> None:
        """Show that a phase of the step begins."""
        self._phase = name
        self._describe(name)

    def counted(self, play: Callable[P, Awaitable[T]], games: int) -> Callable[P, Awaitable[T]]:
        """`play`, with the progress line counting how many of its `games` games have ended."""
        ended = 0

        async def play_and_count(*arguments: P.args, **options: P.kwargs) -> T:
            nonlocal ended
            played = await play(*arguments, **options)
            ended += 1
            self._describe(f"{self._phase} {ended}/{games}")
            return played

        return play_and_count

    def row(self, metrics: dict[str, float]) -> None:
        """Print the row of a step."""
        if self._rows % HEADER_EVERY == 0:
            self._log.say(header(priced=self._priced))
        self._rows += 1
        self._log.say(row(metrics, priced=self._priced))

    def _describe(self, text: str) -> None:
        """Update the text before the bar, at most ten times a second."""
        now = time.monotonic()
        if self._bar is not None and (now - self._drawn > 0.1 or text == self._phase):
            self._drawn = now
            self._bar.set_description_str(text.ljust(15))


def summary(folder: Path, best_step: int, config: AgentConfig) -> str:
    """What was learned, where the results are, and the next commands; all numbers are from metrics.jsonl."""
    lines = read_metrics(folder)
    change = _validation_change(lines, best_step)
    calls = count_calls(lines)
    games = int(sum(line.get("games", 0.0) for line in lines))
    totals = [f"{len(lines) - 1} steps", f"{games:,} games", f"{calls.total:,} calls of {config.env}"]
    if lines and lines[-1].get("env/usd"):
        lost = _lost_dollars(lines[-1])
        totals.append(_dollars(lines[-1]) + (f" ({lost} of it estimated, for lost attempts)" if lost else ""))
    phases = [value for line in lines for name, value in line.items() if name.startswith("time/")]
    totals.append(_duration(sum(phases)))
    mini = config.env == "mini" and set(config.data) <= {"mini"}
    other = ("mini:ood",) if mini else config.test_data or ("FILE",)
    # A folder names no code to import, so the user's own objects must be named again.
    own = ["--env", config.env] if OBJECT_PREFIX in config.env else []
    text = [
        "The run",
        *([change] if change else []),
        f"  took         {', '.join(totals)}",
        *([f"  calls        {calls}"] if calls.total else []),
        "Where it is",
        f"  {folder}/report.html: curves and games, to open in a browser",
        f"  {folder}/agent: the agent of step {best_step}, a Hugging Face folder",
        f"  {folder}/metrics.jsonl: the curves; trajectories/: every game",
        *([f"  {folder}/{TEST_FILE}: the test by dataset"] if config.test_data else []),
        "What to type next",
        f"  {command('ask', '--agent', folder, *own)}",
        f"  {command('evaluate', '--agent', folder, *own, '--data', *other)}",
    ]
    return "\n".join(text)


def nothing_to_learn(game: ScoredGame, metrics: Mapping[str, float]) -> str:
    """An alarm with one game; "" if the games of some question had different rewards.

    Without them every advantage is 0, and the weights do not move.
    """
    if metrics["groups/dropped"] == 1 or metrics["groups/no_spread"] < 1:
        return ""
    cause = "all answers are right already"
    if metrics["em"] < 1:
        cause = "the agent seems not to know the format" if metrics["format"] == 0 else "its games are alike"
    alarm = (
        "Alarm: nothing can be learned from step 1. All games of each question have the same reward, "
        f"{metrics['reward/mean']:.2f} on average, so none is better than another: {cause}. If this goes on, "
        "start from an agent that succeeds sometimes. One game:"
    )
    lines = [*textwrap.wrap(alarm, 80), f"  question     {_one_line(game.trajectory.question.text)}"]
    for turn in game.trajectory.turns:
        lines.append(f"  agent        {_one_line(turn.text)}")
        if turn.reply is not None:
            lines.append(f"  environment  {_one_line(turn.reply)}")
    reward = "no reward" if game.reward is None else f"reward {game.reward.total:.2f}"
    lines.append(f"  ended        {game.trajectory.stop.replace('_', ' ')}, {reward}")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    """The beginning of a text."""
    return textwrap.shorten(text, 64, placeholder=" …") or "(nothing)"


@dataclass(frozen=True)
class Calls:
    """The calls of a run by the games that made them, and by how they were answered: both add up."""

    training: int
    validation: int
    sent: int
    reused: int
    failed: int

    @property
    def total(self) -> int:
        return self.sent + self.reused + self.failed

    def __str__(self) -> str:
        failed = f" + {self.failed:,} failed" if self.failed else ""
        made = f"{self.training:,} in training + {self.validation:,} in validation"
        return f"{made}\n               = {self.sent:,} sent + {self.reused:,} from the journal{failed}"


def count_calls(lines: Sequence[Mapping[str, float]]) -> Calls:
    """The calls of the games of a run's metric lines; a failed call ended its game."""

    def total(*names: str) -> int:
        values = [line.get(name, 0.0) for line in lines for name in names]
        return round(sum(filter(math.isfinite, values)))

    return Calls(
        training=total("env/calls"),
        validation=total("val/calls"),
        sent=total("env/paid"),
        reused=total("env/reused"),
        failed=total("env/errors", "val/errors"),
    )


def _validation_change(lines: list[dict[str, float]], best_step: int) -> str:
    """The first validation and that of the best agent; "" if they are the same."""
    validated = {int(line["step"]): line for line in lines if "val/em" in line}
    if len(validated) < 2 or best_step not in validated:
        return ""
    first, best = validated[min(validated)], validated[best_step]
    metrics = {"EM": "val/em", "reward": "val/reward", "format": "val/format"}
    changes = [f"{label} {first[name]:.3f} → {best[name]:.3f}" for label, name in metrics.items()]
    place = f"from step {min(validated)} to step {best_step}, the best"
    return f"  validation   {'   '.join(changes)}\n               {place}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{seconds / 3600:.1f} h"
