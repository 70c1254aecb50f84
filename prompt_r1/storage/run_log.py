"""What a run writes down: a line of `metrics.jsonl` a step, trajectories, times; and how it speaks."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from prompt_r1.storage.trackers import make_tracker
from prompt_r1.terminal import printable
from prompt_r1.types import ScoredGame


class Clock:
    """Seconds by phase of a step: `with clock.phase("rollout"): …`. `entered` is told each phase."""

    def __init__(self, entered: Callable[[str], None] = lambda name: None) -> None:
        self.seconds: dict[str, float] = {}
        self._entered = entered

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds inside to those of the phase `name`."""
        begin = time.perf_counter()
        self._entered(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """The phases since the last take, as `time/NAME`."""
        seconds, self.seconds = self.seconds, {}
        return {f"time/{name}": value for name, value in seconds.items()}


class Log:
    """Writes to a run folder and the console; the console and the metrics only of the first rank.

    `track` names a second place for the metrics: tensorboard or wandb.
    """

    def __init__(self, folder: Path, *, quiet: bool, track: str = "none") -> None:
        self.folder = folder
        self.quiet = quiet
        self._tracker = None if quiet else make_tracker(track, folder)

    def say(self, text: str = "") -> None:
        """Print lines on the first rank, above the progress bar: it is on stderr, they are on stdout."""
        if not self.quiet:
            tqdm.write(printable(text), file=sys.stdout)

    def metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Append one line to metrics.jsonl: one object a step. Returns it, with its digits."""
        rounded = {
            key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()
        }
        if not self.quiet:
            _append(self.folder / "metrics.jsonl", [rounded])
        if self._tracker is not None:
            self._tracker.add(rounded)
        return rounded

    def close(self) -> None:
        """Hand over what the tracker still holds."""
        if self._tracker is not None:
            self._tracker.close()

    def trajectories(self, name: str, games_PG: list[list[ScoredGame]]) -> None:
        """Write trajectories/NAME.jsonl, a game per line, by group. Every rank writes its own games."""
        path = self.folder / "trajectories" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        rows = [
            {"group": number, "sample": sample} | _row(game)
            for number, group in enumerate(games_PG)
            for sample, game in enumerate(group)
        ]
        _append(path, rows)


def _row(game: ScoredGame) -> dict[str, object]:
    """A game for people and programs to read; without reward and advantage if it was not trained on.

    `sampled` has a digit per token, 1 for the agent's own; `logprobs` are those of the agent's tokens.
    """
    trajectory = game.trajectory
    turns = [asdict(replace(turn, latency=round(turn.latency, 4))) for turn in trajectory.turns]
    logprobs = zip(trajectory.logprobs, trajectory.sampled, strict=True)
    return {
        "question": asdict(trajectory.question),
        "turns": turns,
        "stop": trajectory.stop,
        "error": trajectory.error,
        "answer": trajectory.answer,
        "reward": asdict(game.reward) if game.reward and game.advantage is not None else None,
        "advantage": game.advantage,
        "tokens": trajectory.tokens,
        "sampled": "".join("1" if flag else "0" for flag in trajectory.sampled),
        "logprobs": [round(logprob, 3) for logprob, flag in logprobs if flag],
    }


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl; [] where there is none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def _append(path: Path, rows: Iterable[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
