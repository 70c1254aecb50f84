"""One life of a run after the other: watch where its ranks stand, and end it there."""

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
class Life:
    """What came of one life: the exit codes by rank, and all events."""

    codes: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    struck: float = 0.0  # when it was struck; 0: never
    over: float = 0.0  # when its last rank had ended

    def standing(self, rank: int) -> str:
        """The innermost phase that a rank had begun and not ended when its last event came."""
        begun: list[str] = []
        for event in self.events:
            if event.rank == rank and event.sign == "+":
                begun.append(event.phase)
            elif event.rank == rank and event.phase in begun:
                begun.remove(event.phase)
        return begun[-1] if begun else "between"

    def spans(self, phase: str, rank: int = 0) -> list[float]:
        """Seconds of each time that the phase was gone through."""
        times = [event.time for event in self.events if event.phase == phase and event.rank == rank]
        return [end - begin for begin, end in zip(times[::2], times[1::2], strict=False)]


class Nursery:
    """Ranks that start quickly."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "tests.faults.nursery"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def live(
        self,
        folder: Path,
        arguments: list[str],
        *,
        ranks: int = 2,
        poisoned: int = -1,
        steps: int = 0,
        strike: Callable[[Event, list[int]], bool] = lambda event, processes: False,
    ) -> Life:
        """One life of `train.py` in a folder. `strike` sees every event, and the process ids; when it has
        done something to them it returns True and is not called again. Rank `poisoned` has infinite
        advantages in the first `steps` steps.
        """
        folder.mkdir(parents=True, exist_ok=True)
        pipe = folder / "events"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDWR)  # never at its end, also while nobody writes
        life, processes = Life(), list[int]()

        def watch() -> None:
            rest = b""
            while True:
                rest += os.read(reader, 65536)
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if line == b"end":
                        return
                    rank, sign, phase, moment = line.decode().split()
                    life.events.append(Event(int(rank), sign, phase, float(moment)))
                    started.wait()
                    if not life.struck and strike(life.events[-1], processes):
                        life.struck = time.monotonic()

        started, watcher = threading.Event(), threading.Thread(target=watch)
        watcher.start()
        order = {"ranks": ranks, "arguments": arguments, "folder": str(folder), "events": str(pipe),
                 "poisoned": poisoned, "steps": steps}  # fmt: skip
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            processes += json.loads(self.process.stdout.readline())
            started.set()
            life.codes = json.loads(self.process.stdout.readline())
            life.over = time.monotonic()
        finally:
            started.set()
            os.write(reader, b"end\n")
            watcher.join()
            os.close(reader)
        return life

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    try:
        yield one
    finally:
        one.close()


def striker(
    phase: str, *, times: int = 1, rank: int = 0, delay: float = 0.0, victims: tuple[int, ...] = (0, 1),
    number: int = signal.SIGKILL,
) -> Callable[[Event, list[int]], bool]:  # fmt: skip
    """Send a signal `delay` seconds after a rank has begun a phase for the `times`-th time."""
    seen = 0

    def strike(event: Event, processes: list[int]) -> bool:
        nonlocal seen
        seen += (event.phase, event.rank, event.sign) == (phase, rank, "+")
        if seen < times:
            return False
        time.sleep(delay)
        for victim in victims:
            with suppress(ProcessLookupError):  # it has left
                os.kill(processes[victim], number)
        return True

    return strike


CLOCKED = ("time/", "tokens/s", "games/s", "env/latency", "env/paid", "env/reused")


def curves(run: Path) -> list[dict[str, float]]:
    """The metric lines without what depends on the clock; calls are counted, whoever paid them."""
    lines = []
    for line in read_metrics(run):
        kept = {name: value for name, value in line.items() if not name.startswith(CLOCKED)}
        lines.append(kept | {"env/ended": line["env/paid"] + line["env/reused"]})
    return lines


def tensors(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint and of the exported agent, bit by bit. Which rank wrote it, and
    so in which file it lies, may differ.
    """
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {f"{folder.name} {name}": tensor.numpy().tobytes()
            for folder in (newest, run / "agent") for path in folder.glob("*.safetensors")
            for name, tensor in load_file(path).items()}  # fmt: skip


def games(run: Path) -> dict[str, list[tuple]]:
    """The games of each step: tokens, which were sampled, and how they were judged."""
    found: dict[str, list[tuple]] = {}
    for path in sorted((run / "trajectories").glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            game = json.loads(line)
            found.setdefault(path.stem, []).append((game["tokens"], game["sampled"], game["advantage"]))
    return found


def paid(run: Path) -> dict[str, int]:
    """How often each call was paid."""
    counts: dict[str, int] = {}
    for path in sorted((run / "journal").glob("rank*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            try:
                key = json.loads(line)["key"]
            except ValueError:
                continue  # torn by a kill: its call had not ended
            counts[key] = counts.get(key, 0) + 1
    return counts
