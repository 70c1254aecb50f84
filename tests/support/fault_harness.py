"""The fault harness: runs `train.py`, follows the phases of its ranks and injects faults."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from prompt_r1.training.log import read_metrics
from tests.support.exports import load_tensors
from tests.support.paths import ROOT


@dataclass(frozen=True)
class Fault:
    """A signal to the ranks `targets`, when `rank` starts a phase for the `occurrence`-th time."""

    phase: str
    occurrence: int = 1
    rank: int = 0
    delay: float = 0.0  # seconds from the start of the phase
    targets: tuple[int, ...] = (0, 1)
    number: int = signal.SIGKILL


@dataclass(frozen=True)
class PhaseEvent:
    """The start (+) or end (-) of a phase on a rank."""

    rank: int
    sign: str
    phase: str
    time: float


@dataclass(frozen=True)
class ProcessRun:
    """One start of `train.py`: the exit codes of its ranks, and the events of all phases."""

    exit_codes: list[int]
    events: list[PhaseEvent]
    seconds_after_fault: float  # the seconds until the last rank exited

    def last_phase(self, rank: int) -> str:
        """The innermost phase of a rank at its last event."""
        open_phases: list[str] = []
        for event in self.events:
            if event.rank == rank and event.sign == "+":
                open_phases.append(event.phase)
            elif event.rank == rank and event.phase in open_phases:
                open_phases.remove(event.phase)
        return open_phases[-1] if open_phases else "between"

    def durations(self, phase: str, rank: int = 0) -> list[float]:
        """Seconds that each occurrence of a phase took."""
        times = [event.time for event in self.events if event.phase == phase and event.rank == rank]
        return [end - begin for begin, end in zip(times[::2], times[1::2], strict=False)]


class FaultHarness:
    """Starts `train.py` on several ranks, quickly, through one process that has torch imported."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_server"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        folder: Path,
        arguments: list[str],
        *,
        ranks: int = 2,
        launcher: bool = True,
        fault: Fault | None = None,
    ) -> ProcessRun:
        """Run `train.py` in a folder until all its ranks have exited.

        Without a `launcher`, nobody ends the ranks when one of them fails.
        """
        request = {
            "ranks": ranks,
            "arguments": arguments,
            "folder": str(folder),
            "launcher": launcher,
            "fault": asdict(fault) if fault else None,
        }
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        response = json.loads(self.server.stdout.readline())
        return ProcessRun(
            response["exit_codes"],
            [PhaseEvent(*event) for event in response["events"]],
            response["seconds_after_fault"],
        )

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()


# These metrics depend on the clock, or on which start of a run paid for a call.
NOT_REPRODUCIBLE = ("time/", "tokens/s", "games/s", "env/latency", "env/paid", "env/reused")


def metrics_of(run: Path) -> list[dict[str, float]]:
    """The reproducible metrics of each step, and the number of calls whether paid or reused."""
    lines = []
    for line in read_metrics(run):
        kept = {name: value for name, value in line.items() if not name.startswith(NOT_REPRODUCIBLE)}
        lines.append(kept | {"env/ended": line["env/paid"] + line["env/reused"]})
    return lines


def saved_tensors(run: Path) -> dict[str, bytes]:
    """The bytes of every tensor of the newest checkpoint and of the exported agent.

    File names are left out: they depend on which rank wrote a tensor.
    """
    newest = max((run / "checkpoints").glob("step-*"))
    return {
        f"{folder.name} {name}": tensor.numpy().tobytes()
        for folder in (newest, run / "agent")
        for name, tensor in load_tensors(folder).items()
    }


def games_of(run: Path) -> dict[str, list[tuple]]:
    """Tokens, sampled mask and advantage of every game, by trajectory file."""
    games: dict[str, list[tuple]] = {}
    for path in sorted((run / "trajectories").glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            game = json.loads(line)
            games.setdefault(path.stem, []).append((game["tokens"], game["sampled"], game["advantage"]))
    return games


def paid_calls(run: Path) -> dict[str, int]:
    """How often each call was paid, by its key in the journal."""
    counts: dict[str, int] = {}
    for path in sorted((run / "journal").glob("rank*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            try:
                call = json.loads(line)
            except ValueError:
                continue  # a kill cut this line short: its call had not ended
            if "reply" in call:  # the line of its end
                counts[call["key"]] = counts.get(call["key"], 0) + 1
    return counts
