"""Start runs of train.py, follow the phases of their ranks, and send signals at chosen moments."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from prompt_r1.storage.run_log import read_metrics
from tests.paths import ROOT


@dataclass(frozen=True)
class Event:
    """A phase of a rank that begins (+) or ends (-)."""

    rank: int
    sign: str
    phase: str
    time: float


@dataclass
class RunResult:
    """The result of one run: exit codes by rank, and all events."""

    codes: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    signalled: float = 0.0  # time of the signal; 0: none was sent
    ended: float = 0.0  # time when the last rank had ended

    def last_phase(self, rank: int) -> str:
        """The innermost phase of a rank that had begun but not ended at its last event."""
        begun: list[str] = []
        for event in self.events:
            if event.rank == rank and event.sign == "+":
                begun.append(event.phase)
            elif event.rank == rank and event.phase in begun:
                begun.remove(event.phase)
        return begun[-1] if begun else "between"

    def spans(self, phase: str, rank: int = 0) -> list[float]:
        """The seconds of each time that the rank was in the phase."""
        times = [event.time for event in self.events if event.phase == phase and event.rank == rank]
        return [end - begin for begin, end in zip(times[::2], times[1::2], strict=False)]


class Launcher:
    """Starts runs quickly, through a fork server."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "tests.faults.fork_server"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def run(
        self,
        folder: Path,
        arguments: list[str],
        *,
        ranks: int = 2,
        poisoned: int = -1,
        steps: int = 0,
        on_event: Callable[[Event, list[int]], bool] = lambda event, processes: False,
    ) -> RunResult:
        """Run train.py in a folder until all ranks have ended.

        `on_event` is called with every event and the process ids, until it returns True. Rank `poisoned` has
        infinite advantages in the first `steps` steps.
        """
        folder.mkdir(parents=True, exist_ok=True)
        pipe = folder / "events"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDWR)  # RDWR: no end of file while there is no writer
        result, processes = RunResult(), list[int]()

        def watch() -> None:
            rest = b""
            while True:
                rest += os.read(reader, 65536)
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if line == b"end":
                        return
                    rank, sign, phase, moment = line.decode().split()
                    result.events.append(Event(int(rank), sign, phase, float(moment)))
                    started.wait()
                    if not result.signalled and on_event(result.events[-1], processes):
                        result.signalled = time.monotonic()

        started, watcher = threading.Event(), threading.Thread(target=watch)
        watcher.start()
        order = {
            "ranks": ranks,
            "arguments": arguments,
            "folder": str(folder),
            "events": str(pipe),
            "poisoned": poisoned,
            "steps": steps,
        }
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            processes += json.loads(self.process.stdout.readline())
            started.set()
            result.codes = json.loads(self.process.stdout.readline())
            result.ended = time.monotonic()
        finally:
            started.set()
            os.write(reader, b"end\n")
            watcher.join()
            os.close(reader)
        return result

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def open_launcher() -> Iterator[Launcher]:
    """A launcher that is closed at the end."""
    launcher = Launcher()
    try:
        yield launcher
    finally:
        launcher.close()


def signal_in(
    phase: str,
    *,
    times: int = 1,
    rank: int = 0,
    delay: float = 0.0,
    targets: tuple[int, ...] = (0, 1),
    number: int = signal.SIGKILL,
) -> Callable[[Event, list[int]], bool]:
    """An `on_event` that signals the ranks `targets`, once.

    The signal is sent `delay` seconds after `rank` has begun the phase for the `times`-th time.
    """
    seen = 0

    def on_event(event: Event, processes: list[int]) -> bool:
        nonlocal seen
        if (event.phase, event.rank, event.sign) == (phase, rank, "+"):
            seen += 1
        if seen < times:
            return False
        time.sleep(delay)
        for target in targets:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(processes[target], number)
        return True

    return on_event


TIMED = ("time/", "tokens/s", "games/s", "env/latency", "env/paid", "env/reused")


def curves(run: Path) -> list[dict[str, float]]:
    """The metric lines without metrics that depend on time; env/ended counts all calls, paid and reused."""
    lines = []
    for line in read_metrics(run):
        kept = {name: value for name, value in line.items() if not name.startswith(TIMED)}
        lines.append(kept | {"env/ended": line["env/paid"] + line["env/reused"]})
    return lines


def tensors(run: Path) -> dict[str, bytes]:
    """The bytes of every tensor of the newest checkpoint and of the exported agent, from all their files."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    found = {}
    for folder in (newest, run / "agent"):
        for path in folder.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                found[f"{folder.name} {name}"] = tensor.numpy().tobytes()
    return found


def games(run: Path) -> dict[str, list[tuple]]:
    """The games in each trajectory file: tokens, which of them were sampled, and advantage."""
    found: dict[str, list[tuple]] = {}
    for path in sorted((run / "trajectories").glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            game = json.loads(line)
            found.setdefault(path.stem, []).append((game["tokens"], game["sampled"], game["advantage"]))
    return found


def paid(run: Path) -> dict[str, int]:
    """How often each call was paid for, by its key."""
    counts: dict[str, int] = {}
    for path in sorted((run / "journal").glob("rank*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            try:
                key = json.loads(line)["key"]
            except ValueError:
                continue  # cut short by a kill: its call had not ended
            counts[key] = counts.get(key, 0) + 1
    return counts
