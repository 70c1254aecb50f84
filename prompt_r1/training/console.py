"""What a person sees of a training: a progress line, a row a step, a summary at the end."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import ParamSpec, TypeVar

from tqdm import tqdm

from prompt_r1.config.train import TrainConfig
from prompt_r1.storage.run_log import Log, read_metrics

P = ParamSpec("P")
T = TypeVar("T")

HEADER_EVERY = 25  # rows: the header is always on the screen
RECENT = 5  # steps whose mean stands for the beginning and the end of the training curves

# Label, metric, digits after the point. Each label is as wide as its numbers need.
COLUMNS = (
    ("reward", "reward/mean", 3),
    ("   EM", "em", 3),
    ("format", "format", 3),
    ("turns", "turns", 2),
    ("     KL", "kl", 4),
    ("games/s", "games/s", 1),
)
BAR = (("reward", "reward/mean"), ("EM", "em"), ("format", "format"), ("KL", "kl"))
VALIDATION = (("   EM", "val/em", 3), ("reward", "val/reward", 3), ("format", "val/format", 3))


def header(*, priced: bool) -> str:
    """The labels above the rows."""
    labels = [label for label, _, _ in COLUMNS] + ["  spent"] * priced
    validation = [label for label, _, _ in VALIDATION]
    return "  ".join([" step", *labels, "| validation:", *validation])


def row(metrics: dict[str, float], *, priced: bool) -> str:
    """One step under `header`; blank where there is no number (step 0 only measures the start)."""
    cells = [f"{int(metrics['step']):5}"]
    cells += [_cell(*column, metrics) for column in COLUMNS]
    if priced:
        cells.append(_dollars(metrics).rjust(7))
    if "val/em" in metrics:
        cells += ["|            ", *(_cell(*column, metrics) for column in VALIDATION)]
    return "  ".join(cells).rstrip()


def _cell(label: str, name: str, digits: int, metrics: dict[str, float]) -> str:
    text = f"{metrics[name]:.{digits}f}" if name in metrics else ""
    return text.rjust(len(label))


class Console:
    """The progress line and the rows of one training; `priced`: dollars are worth a column."""

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
        """Show the progress line, on a terminal, from `step` on."""
        self._bar = tqdm(
            total=self._steps,
            initial=max(step, 0),
            disable=True if self._log.quiet else None,  # None: only on a terminal
            leave=False,
            dynamic_ncols=True,
            bar_format="{desc} step {n_fmt}/{total_fmt} |{bar:6}| {remaining} left{postfix}",
        )
        try:
            yield
        finally:
            self._bar.close()
            self._bar = None

    def at(self, step: int) -> None:
        """The training has done `step`: the next one, or an earlier one after a rollback."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def phase(self, name: str) -> None:
        """Begin a phase of the step."""
        self._phase = name
        self._describe(name)

    def counted(self, play: Callable[P, Awaitable[T]], games: int) -> Callable[P, Awaitable[T]]:
        """`play`, of whose `games` games the progress line shows how many have ended."""
        ended = 0

        async def play_and_count(*arguments: P.args, **options: P.kwargs) -> T:
            nonlocal ended
            played = await play(*arguments, **options)
            ended += 1
            self._describe(f"{self._phase} {ended}/{games}")
            return played

        return play_and_count

    def row(self, metrics: dict[str, float]) -> None:
        """Print a step's row; its numbers stay beside the bar until the next step has its own."""
        if self._rows % HEADER_EVERY == 0:
            self._log.say(header(priced=self._priced))
        self._rows += 1
        self._log.say(row(metrics, priced=self._priced))
        if self._bar is not None:
            self._bar.set_postfix_str(beside_bar(metrics, priced=self._priced), refresh=False)

    def _describe(self, text: str) -> None:
        """Show what is done now, at most ten times a second."""
        now = time.monotonic()
        if self._bar is not None and (now - self._drawn > 0.1 or text == self._phase):
            self._drawn = now
            self._bar.set_description_str(text.ljust(15))


def beside_bar(metrics: dict[str, float], *, priced: bool) -> str:
    """The newest step in a few words, the most telling ones first: a narrow terminal cuts the end."""
    shown = [f"{label} {metrics[name]:.2f}" for label, name in BAR if name in metrics]
    shown += [_dollars(metrics)] * priced
    return "  ".join([*shown, *(f"{metrics[name]:.1f} {name}" for name in ["games/s"] if name in metrics)])


def _dollars(metrics: dict[str, float]) -> str:
    usd = metrics.get("env/usd", 0.0)
    return f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}"


def summary(folder: Path, best_step: int, config: TrainConfig) -> str:
    """What was learned, where it is, and what to type next; the numbers are those of metrics.jsonl."""
    lines = read_metrics(folder)
    learned = [_learned("validation", _validation_ends(lines, best_step)),
               _learned("in training", _training_ends(lines))]  # fmt: skip
    seconds = sum(value for line in lines for name, value in line.items() if name.startswith("time/"))
    calls = sum(line.get("env/paid", 0.0) for line in lines)
    played = int(sum(line.get("games", 0.0) for line in lines))
    took = [f"{len(lines) - 1} steps", f"{played:,} games", f"{calls:,.0f} calls of {config.env}"]
    if lines and lines[-1].get("env/usd"):
        took.append(_dollars(lines[-1]))
    other = "mini:ood" if config.env == "mini" else " ".join(config.test_data) or "FILE"
    return "\n".join([
        "What was learned",
        *filter(None, learned),
        f"  took         {', '.join([*took, _duration(seconds)])}",
        "Where it is",
        f"  {folder}/agent: the agent of step {best_step}, a Hugging Face folder",
        f"  {folder}/metrics.jsonl: the curves; trajectories/: every game",
        "What to type next",
        f"  python infer.py --agent {folder}",
        f"  python evaluate.py --agent {folder} --data {other}",
        f"  python -m prompt_r1.report {folder}",
    ])  # fmt: skip


Ends = tuple[dict[str, float], dict[str, float], str]


def _validation_ends(lines: list[dict[str, float]], best_step: int) -> Ends | None:
    """The first validation, that of the kept agent, and what they are."""
    validated = {int(line["step"]): line for line in lines if "val/em" in line}
    if len(validated) < 2 or best_step not in validated:
        return None
    first = min(validated)
    names = {label.strip(): name for label, name, _ in VALIDATION}
    ends = [{label: validated[step][name] for label, name in names.items()} for step in (first, best_step)]
    return ends[0], ends[1], f"step {first} → step {best_step}, the best"


def _training_ends(lines: list[dict[str, float]]) -> Ends | None:
    """Means over the first and the last steps of the sampled games."""
    steps = [line for line in lines if "reward/mean" in line]
    if len(steps) < 2 * RECENT:
        return None
    names = {"EM": "em", "reward": "reward/mean", "format": "format"}
    first, last = (
        {label: mean(line[name] for line in part) for label, name in names.items()}
        for part in (steps[:RECENT], steps[-RECENT:])
    )
    return first, last, f"sampled games, mean of {RECENT} steps: first → last"


def _learned(label: str, ends: Ends | None) -> str:
    if ends is None:
        return ""
    first, last, what = ends
    changes = "   ".join(f"{name} {first[name]:.3f} → {last[name]:.3f}" for name in first)
    return f"  {label:11}  {changes}   ({what})"


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{hours:.1f} h"
