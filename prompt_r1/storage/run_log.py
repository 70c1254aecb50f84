"""The log of a run: metric lines, trajectories, times by phase, and messages on the console."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from prompt_r1.errors import UsageError
from prompt_r1.foreign import is_finite_number
from prompt_r1.storage.trackers import make_tracker
from prompt_r1.terminal import printable
from prompt_r1.types import ScoredGame


class Clock:
    """Measures the seconds of each phase of a step: `with clock.phase("rollout"): …`.

    `on_phase` is called with the name of each phase when it begins.
    """

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the phase `name`."""
        begin = time.perf_counter()
        self._on_phase(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """Return the seconds since the last take as `time/NAME`, and reset them."""
        seconds, self.seconds = self.seconds, {}
        return {f"time/{name}": value for name, value in seconds.items()}


class Log:
    """Writes trajectories on every rank; metrics and messages on the first rank only (`quiet`: other ranks).

    `track` names a tracker that also gets the metrics: none, tensorboard or wandb. `on_metrics` may be set to
    a function that gets them too.
    """

    def __init__(self, folder: Path, *, quiet: bool, track: str = "none") -> None:
        self.folder = folder
        self.quiet = quiet
        self.on_metrics: Callable[[dict[str, float]], object] = lambda metrics: None
        self._tracker = None if quiet else make_tracker(track, folder)

    def say(self, text: str = "") -> None:
        """Print text on stdout, above the progress bar, which is on stderr."""
        if not self.quiet:
            tqdm.write(printable(text), file=sys.stdout)

    def metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Append the metrics of one step to metrics.jsonl. Returns them as written, with six digits."""
        rounded = dict(values)
        for key, value in values.items():
            if isinstance(value, float):  # not an integer, such as the step
                rounded[key] = float(f"{value:.6g}")
        if not self.quiet:
            self._check_folder()
            _append(self.folder / "metrics.jsonl", [rounded])
        if self._tracker is not None:
            self._tracker.add(rounded)
        if not self.quiet:
            self.on_metrics(dict(rounded))
        return rounded

    def _check_folder(self) -> None:
        if not self.folder.is_dir():
            raise UsageError(
                f"{self.folder} was deleted or renamed during the run: nothing can be saved there"
            )

    def close(self) -> None:
        """Flush and close the tracker."""
        if self._tracker is not None:
            self._tracker.close()

    def trajectories(self, name: str, games_PG: list[list[ScoredGame]], *, trained: bool = True) -> None:
        """Write trajectories/NAME.jsonl with one game per line, group by group. Called by every rank.

        `trained`: the games are for an update, and rewards that it does not use are left out.
        """
        self._check_folder()
        path = self.folder / "trajectories" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        for number, group in enumerate(games_PG):
            rows = [
                {"group": number, "sample": sample} | _row(game, trained) for sample, game in enumerate(group)
            ]
            _append(path, rows)


def _row(game: ScoredGame, trained: bool) -> dict[str, object]:
    """A game as a row of trajectories/*.jsonl; one that its update left out has no reward or advantage.

    `sampled` has one digit per token, 1 for the agent's own; `logprobs` has only the agent's tokens.
    """
    trajectory = game.trajectory
    turns = [asdict(replace(turn, latency=round(turn.latency, 4))) for turn in trajectory.turns]
    logprobs = zip(trajectory.logprobs, trajectory.sampled, strict=True)
    used = game.advantage is not None or not trained
    return {
        "question": asdict(trajectory.question),
        "turns": turns,
        "stop": trajectory.stop,
        "error": trajectory.error,
        "answer": trajectory.answer,
        "reward": asdict(game.reward) if game.reward and used else None,
        "advantage": game.advantage,
        **({"turn_advantages": game.turn_advantages} if game.turn_advantages else {}),
        "tokens": trajectory.tokens,
        "sampled": "".join("1" if flag else "0" for flag in trajectory.sampled),
        "logprobs": [round(logprob, 3) for logprob, flag in logprobs if flag],
    }


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read the lines of a run's metrics.jsonl; [] if there is none.

    Skips damaged lines, and values that are no numbers. A run may have logged nan: it raises an alarm.
    """
    path = folder / "metrics.jsonl"
    lines = []
    for text in path.read_text("utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and is_finite_number(line.get("step")):
            numbers = {name: value for name, value in line.items() if _is_number(value)}
            lines.append(numbers)
    return lines


def _is_number(value: object) -> bool:
    return isinstance(value, float) or is_finite_number(value)


def _append(path: Path, rows: Iterable[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
