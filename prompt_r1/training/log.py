"""A run's log: metrics, trajectories, times, console messages. Resuming trims it."""

import json
import re
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from prompt_r1.errors import UsageError
from prompt_r1.programs.files import is_finite_number, json_object, replace_file
from prompt_r1.programs.text import printable
from prompt_r1.types import ScoredGame

HEADER_EVERY = 25  # rows

# The table of steps, in 80 columns: label, metric and format.
COLUMNS = (
    ("step", "step", "4.0f"),
    ("reward", "reward/mean", "6.3f"),
    ("EM", "em", "5.3f"),
    ("format", "format", "6.3f"),
    ("turns", "turns", "5.2f"),
    ("KL", "kl", "6.4f"),
)
SPEED = ("games/s", "games/s", "7.4g")
DOLLARS = ("dollars", "env/usd", "9.4f")  # of the whole run, in place of the speed
VALIDATION = (("EM", "val/em", "5.3f"), ("reward", "val/reward", "6.3f"), ("format", "val/format", "6.3f"))


def header(*, priced: bool) -> str:
    """The labels above the rows; `priced` shows dollars in place of the speed."""
    columns = [(*COLUMNS, DOLLARS if priced else SPEED), VALIDATION]
    step, validation = (" ".join(label.rjust(int(form[0])) for label, _, form in part) for part in columns)
    return f"{step} | val {validation}"


def row(metrics: Mapping[str, float], *, priced: bool) -> str:
    """One step under `header`. A missing metric is blank, as in step 0, which only validates."""
    columns = [(*COLUMNS, DOLLARS if priced else SPEED), VALIDATION]
    step, validation = (
        " ".join(f"{metrics[m]:{form}}" if m in metrics else " " * int(form[0]) for _, m, form in part)
        for part in columns
    )
    return f"{step} |     {validation}" if "val/em" in metrics else step.rstrip()


class Log:
    """Writes trajectories on every rank; metrics and messages on the first rank only.

    Metrics also go to Weights & Biases (`wandb`), and a row of them to stdout (`priced`: with dollars). A bar
    on stderr shows how many of the run's `games` are played, on a terminal only (`disable=None` says so).
    """

    def __init__(
        self, folder: Path, *, first: bool, games: int = 0, priced: bool = False, wandb: bool = False
    ) -> None:
        self.seconds = defaultdict[str, float](float)  # of each phase, since the last metrics
        bar = "{l_bar}{bar:10}| {remaining} left"
        self.progress = tqdm(total=games, disable=not first or None, leave=False, bar_format=bar)
        self.folder = folder
        self._first, self._priced = first, priced
        self._rows = 0
        self._wandb = open_wandb(folder) if wandb and first else None

    def say(self, text: str = "") -> None:
        """Print text on stdout, above the progress bar."""
        if self._first:
            tqdm.write(printable(text), file=sys.stdout)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase of a step beside the progress bar, and add its time to the next metrics."""
        begin = time.perf_counter()
        self.progress.set_description_str(name)
        yield
        self.seconds[name] += time.perf_counter() - begin

    def metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Append the metrics of one step, and time/PHASE, to metrics.jsonl and print their row.

        Returns them as written, with six digits; integers, such as the step, are kept.
        """
        values = values | {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}
        if not self._first:
            return rounded
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(_line(rounded))
        if self._wandb is not None:
            self._wandb.log(rounded, step=int(rounded["step"]))
        if self._rows % HEADER_EVERY == 0:
            self.say(header(priced=self._priced))
        self._rows += 1
        self.say(row(rounded, priced=self._priced))
        return rounded

    def close(self) -> None:
        """Remove the progress bar, and finish the run of Weights & Biases."""
        self.progress.close()
        if self._wandb is not None:
            self._wandb.finish()

    def trajectories(self, name: str, games_PG: list[list[ScoredGame]]) -> None:
        """Write trajectories/NAME.jsonl with one game per line, group by group. Called by every rank."""
        path = self.folder / "trajectories" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for number, group in enumerate(games_PG):
                for sample, game in enumerate(group):
                    file.write(_line({"group": number, "sample": sample} | _row(game)))


def open_wandb(folder: Path) -> Any:
    """Open the W&B run of a run folder, in the project prompt-r1; a resumed training continues the same one.

    Raises UsageError without the package or an account.
    """
    if find_spec("wandb") is None:
        raise UsageError("--wandb: `pip install wandb`, or omit it: metrics.jsonl has the same numbers")
    import wandb

    file = folder / "wandb" / "run-id"
    file.parent.mkdir(exist_ok=True)
    if not file.exists():
        file.write_text(uuid.uuid4().hex, "utf-8")
    identity = file.read_text("utf-8").strip()
    try:
        return wandb.init(project="prompt-r1", name=folder.name, dir=str(folder), id=identity, resume="allow")
    except wandb.Error as error:
        raise UsageError(f"--wandb: {error}; log in, or set WANDB_MODE=offline") from None


def _row(game: ScoredGame) -> dict[str, object]:
    """A game as a row of trajectories/*.jsonl; one that no update used has no advantage.

    `sampled` has one digit per token, 1 for the agent's own; `logprobs` has only the agent's tokens.
    """
    trajectory, question = game.trajectory, vars(game.trajectory.question)
    logprobs = zip(trajectory.logprobs, trajectory.sampled, strict=True)
    return {
        "question": {name: value for name, value in question.items() if name != "extra"},
        "turns": [asdict(turn) for turn in trajectory.turns],
        "stop": trajectory.stop,
        "error": trajectory.error,
        "answer": trajectory.answer,
        "reward": asdict(game.reward) if game.reward else None,
        "advantage": game.advantage,
        "usd": trajectory.spent.usd,
        "tokens": trajectory.tokens,
        "sampled": "".join("1" if flag else "0" for flag in trajectory.sampled),
        "logprobs": [round(logprob, 3) for logprob, flag in logprobs if flag],
    }


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read the lines of a run's metrics.jsonl; [] if there is none.

    Skips damaged lines, and values that are no numbers. A run may have logged nan: it raises an alarm.
    """
    path = folder / "metrics.jsonl"
    texts = path.read_text("utf-8", errors="replace").split("\n") if path.exists() else []
    lines = [line for line in map(json_object, texts) if is_finite_number(line.get("step"))]
    return [{k: v for k, v in line.items() if isinstance(v, float) or is_finite_number(v)} for line in lines]


def trim_run(run: Path, *, trained: int, logged: int) -> None:
    """Remove what a resumed run writes again: games after step `trained`, metric lines after step `logged`.

    Another number of ranks would not overwrite all files of games. The test is played again too.
    """
    kept_up_to = {"step": trained, "validation": logged, "test": -1}
    for path in (run / "trajectories").glob("*.jsonl"):
        match = re.match(r"(step|validation|test)-(\d*)", path.name)
        if match and int(match[2] or 0) > kept_up_to[match[1]]:
            path.unlink()
    kept = [_line(line) for line in read_metrics(run) if line["step"] <= logged]
    replace_file(run / "metrics.jsonl", "".join(kept).encode())


def _line(values: Mapping[str, object]) -> str:
    return json.dumps(values, separators=(",", ":")) + "\n"
