"""The log of a run: metrics, games, times of phases, and messages on the console."""

import errno
import json
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from prompt_r1.errors import UsageError
from prompt_r1.programs.command_line import discard_stdout
from prompt_r1.programs.reading import json_object
from prompt_r1.programs.text import printable
from prompt_r1.types import ScoredGame

HEADER_EVERY = 25  # The labels are repeated after this many rows.


# The table of steps. Its lines have at most 80 characters.
LABELS = "step reward    EM format turns     KL"


def header(*, priced: bool) -> str:
    """The labels above the rows of steps. A run with prices shows its dollars in place of its speed."""
    last = "  dollars" if priced else "games/s"
    return f"{LABELS} {last} | val    EM reward format"


def step_row(metrics: Mapping[str, float], *, priced: bool) -> str:
    """The row of one step. Step 0 plays no games, and not every step has a validation: then it has blanks."""
    row = f"{metrics['step']:4.0f}"
    if "games" in metrics:
        row += f" {metrics['reward/mean']:6.3f} {metrics['em']:5.3f} {metrics['format']:6.3f}"
        row += f" {metrics['turns']:5.2f} {metrics['kl']:6.4f}"
    row = row.ljust(len(LABELS))
    if priced:
        row += f" {metrics['env/usd']:9.4f}"  # of the whole run so far
    else:
        row += f" {metrics['games/s']:7.4g}" if "games" in metrics else " " * 8
    if "val/em" in metrics:
        row += f" |     {metrics['val/em']:5.3f} {metrics['val/reward']:6.3f} {metrics['val/format']:6.3f}"
    return row.rstrip()


class Log:
    """Writes the games of each rank, and metrics and messages of the first rank.

    Metrics go to metrics.jsonl, as a row to stdout (with dollars if `priced`), and to Weights & Biases if
    `wandb` is set. On a terminal, a bar on stderr shows how many of the run's `games` have been played.
    """

    def __init__(
        self, folder: Path, *, rank: int = 0, games: int = 0, priced: bool = False, wandb: bool = False
    ) -> None:
        self.folder = folder
        self._rank = rank
        self._priced = priced
        # Seconds of each phase since the last metrics.
        self.seconds = defaultdict[str, float](float)
        # With None, tqdm shows the bar on a terminal only. `programs.progress.progress_bar` would write lines
        # into a log file, where the rows of the steps show the progress already.
        is_hidden = True if rank > 0 else None
        layout = "{l_bar}{bar:10}| {remaining} left"
        self._bar = tqdm(total=games, disable=is_hidden, leave=False, bar_format=layout)
        self._rows_shown = 0
        self._wandb = open_wandb(folder) if wandb and rank == 0 else None

    def say(self, text: str) -> None:
        """Print text on stdout, above the bar.

        If nobody reads stdout any more, the run goes on and prints nothing more: its terminal was closed
        (under nohup), or the program that it was piped into has ended (`python train.py | head -5`).
        """
        if self._rank > 0:
            return
        try:
            tqdm.write(printable(text), file=sys.stdout)
            sys.stdout.flush()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            discard_stdout()

    def begin_after(self, step: int, *, steps: int) -> None:
        """Begin the bar with the games up to `step`. Each of the run's `steps` has equally many games."""
        self._bar.initial = self._bar.n = self._bar.total * step // steps

    def count_game(self) -> None:
        """Move the bar on by a game that has been played."""
        self._bar.update()

    def end_bar(self) -> None:
        """Remove the bar."""
        self._bar.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the name of a phase beside the bar, and add its time to the next metrics."""
        begin = time.perf_counter()
        self._bar.set_description_str(name)
        yield
        self.seconds[name] += time.perf_counter() - begin

    def write_metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Append the metrics of one step, with the seconds of its phases, to metrics.jsonl; print their row.

        Returns the metrics as they are written: integers as they are, other numbers with six digits.
        """
        rounded = {name: _six_digits(value) for name, value in values.items()}
        for phase, seconds in self.seconds.items():
            rounded[f"time/{phase}"] = _six_digits(seconds)
        self.seconds.clear()
        if self._rank > 0:
            return rounded
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json_line(rounded))
        if self._wandb is not None:
            self._wandb.log(rounded, step=int(rounded["step"]))
        if self._rows_shown % HEADER_EVERY == 0:
            self.say(header(priced=self._priced))
        self._rows_shown += 1
        self.say(step_row(rounded, priced=self._priced))
        return rounded

    def close(self) -> None:
        """Remove the bar, and end the run of Weights & Biases."""
        self.end_bar()
        if self._wandb is not None:
            self._wandb.finish()

    def write_games(self, name: str, games_PG: list[list[ScoredGame]]) -> None:
        """Write trajectories/NAME-rankN.jsonl, a game per line, group by group. Called by every rank."""
        path = self.folder / "trajectories" / f"{name}-rank{self._rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for number, group in enumerate(games_PG):
                for sample, game in enumerate(group):
                    place = {"group": number, "sample": sample}
                    file.write(json_line(place | _game_row(game)))


def open_wandb(folder: Path) -> Any:
    """Open the W&B run of a run folder, in the project prompt-r1. A resumed training continues its W&B run.

    Raises UsageError if the account is missing.
    """
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


def _game_row(game: ScoredGame) -> dict[str, object]:
    """A game as a row of trajectories/*.jsonl.

    `sampled` has one digit per token: 1 if the agent sampled it, else 0. `logprobs` has a number for each
    sampled token. The advantage is null if the game, or too much of its group, broke. With a user's
    advantages of turns it is their mean, and `turn_advantages` has them.
    """
    trajectory = game.trajectory
    question = {name: value for name, value in vars(trajectory.question).items() if name != "extra"}
    row: dict[str, object] = {
        "question": question,
        "turns": [vars(turn) | {"action": vars(turn.action)} for turn in trajectory.turns],
        "stop": trajectory.stop,
        "error": trajectory.error,
        "answer": trajectory.answer,
        "reward": vars(game.reward) if game.reward else None,
        "advantage": game.advantage,
        "usd": trajectory.spent.usd,
        "tokens": trajectory.tokens,
        "sampled": "".join("1" if flag else "0" for flag in trajectory.sampled),
        "logprobs": [round(value, 3) for value in compress(trajectory.logprobs, trajectory.sampled)],
    }
    if game.turn_advantages:
        row["turn_advantages"] = list(game.turn_advantages)
    return row


def _six_digits(value: float) -> float:
    """Round a number to six significant digits; leave an integer as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read the lines of a run's metrics.jsonl; [] if there is none. NaN and infinity are among the values."""
    path = folder / "metrics.jsonl"
    lines = read_json_lines(path) if path.exists() else []
    return [line for line in lines if "step" in line]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON lines file. Lines that a kill or a crash has damaged are left out."""
    lines = [json_object(line) for line in path.read_text("utf-8", errors="replace").split("\n")]
    return [line for line in lines if line]


def json_line(values: Mapping[str, object]) -> str:
    """A line of a JSON lines file."""
    return json.dumps(values, separators=(",", ":")) + "\n"
