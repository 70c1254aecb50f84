"""The fault harness: runs `train.py`, follows the phases of its ranks and injects faults."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prompt_r1.storage.run_log import read_metrics
from tests.support.exports import load_tensors
from tests.support.paths import ROOT

STOP_READING = b"stop reading"


@dataclass(frozen=True)
class PhaseEvent:
    """The start (+) or end (-) of a phase on a rank."""

    rank: int
    sign: str
    phase: str
    time: float


# Called with each event and the process ids by rank; returns True once it has injected its fault.
Fault = Callable[[PhaseEvent, list[int]], bool]


@dataclass
class ProcessRun:
    """The exit codes of one start of `train.py`, by rank, and all phase events."""

    exit_codes: list[int] = field(default_factory=list)
    events: list[PhaseEvent] = field(default_factory=list)
    fault_time: float = 0.0  # when the fault was injected; 0: it was not
    end_time: float = 0.0  # when the last rank exited

    @property
    def seconds_after_fault(self) -> float:
        """Seconds from the fault to the exit of the last rank."""
        return self.end_time - self.fault_time

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


def signal_at(
    phase: str,
    *,
    occurrence: int = 1,
    rank: int = 0,
    delay: float = 0.0,
    targets: tuple[int, ...] = (0, 1),
    number: int = signal.SIGKILL,
) -> Fault:
    """Send a signal to the ranks `targets`, `delay` seconds after `rank` starts a phase for the
    `occurrence`-th time.
    """
    starts = 0

    def fault(event: PhaseEvent, processes: list[int]) -> bool:
        nonlocal starts
        if (event.phase, event.rank, event.sign) == (phase, rank, "+"):
            starts += 1
        if starts < occurrence:
            return False
        time.sleep(delay)
        for target in targets:
            with suppress(ProcessLookupError):  # it has exited
                os.kill(processes[target], number)
        return True

    return fault


class EventReader:
    """Reads phase events from a named pipe in a thread, and passes them to a fault."""

    def __init__(self, path: Path, run: ProcessRun, fault: Fault) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        # Also open for writing: reading waits for events even while no rank has the pipe open.
        self.pipe = os.open(path, os.O_RDWR)
        self.run, self.fault = run, fault
        self.processes: list[int] = []
        self.started = threading.Event()  # set when the process ids are known
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def close(self) -> None:
        self.started.set()
        os.write(self.pipe, STOP_READING + b"\n")
        self.thread.join()
        os.close(self.pipe)

    def _read(self) -> None:
        rest = b""
        while True:
            rest += os.read(self.pipe, 65536)
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if line == STOP_READING:
                    return
                rank, sign, phase, moment = line.decode().split()
                event = PhaseEvent(int(rank), sign, phase, float(moment))
                self.run.events.append(event)
                self.started.wait()
                if not self.run.fault_time and self.fault(event, self.processes):
                    self.run.fault_time = time.monotonic()


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
        fault: Fault = lambda event, processes: False,
    ) -> ProcessRun:
        """Run `train.py` in a folder until all its ranks have exited.

        `fault` is called with every phase event until it returns True. Without a `launcher`, nobody ends the
        ranks when one of them fails.
        """
        folder.mkdir(parents=True, exist_ok=True)
        run = ProcessRun()
        reader = EventReader(folder / "events", run, fault)
        request = {
            "ranks": ranks,
            "arguments": arguments,
            "folder": str(folder),
            "events": str(folder / "events"),
            "launcher": launcher,
        }
        try:
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            reader.processes += json.loads(self.server.stdout.readline())
            reader.started.set()
            run.exit_codes = json.loads(self.server.stdout.readline())
            run.end_time = time.monotonic()
        finally:
            reader.close()
        return run

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()


# Metrics that depend on the clock, or on which start of a run paid for a call.
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
    """How often each call was paid for, by its key in the journal."""
    counts: dict[str, int] = {}
    for path in sorted((run / "journal").glob("rank*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            try:
                call = json.loads(line)
            except ValueError:
                continue  # a kill cut this line short: its call had not ended
            if "text" in call:  # the line of its end
                counts[call["key"]] = counts.get(call["key"], 0) + 1
    return counts
