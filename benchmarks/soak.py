"""Trains for a while through the served mini world with faults; memory and descriptors must stay level.

    OMP_NUM_THREADS=1 python -m benchmarks.soak [--minutes 20] [--fail 0.1] [--out FOLDER] [FLAG …]

The mini world is served in a process of its own, and `train.py` runs in another one, each call for real
(`--journal live`), until SIGTERM after the given minutes. Every second its resident memory and its open
descriptors are read (Linux). Printed: steps, calls, lost attempts and broken games from `metrics.jsonl`, the
memory and the descriptors in each fifth of the time, and the exit code, which must be 75. The last line is
JSON. Other flags are those of `train.py`.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.calls import served_mini_world
from prompt_r1.storage.run_log import read_metrics

PARTS = 5  # of the time, for the means
SCRIPT = Path(__file__).parents[1] / "train.py"


@dataclass
class Sample:
    """What /proc says of the training at one moment."""

    megabytes: float
    descriptors: int


@dataclass
class Soak:
    """What a run did and what it held."""

    minutes: float
    steps: int
    calls: float
    lost: float  # attempts without a usable response
    broken: float  # games that the environment broke
    cpu: float  # seconds of the training
    exit_code: int
    megabytes: list[float] = field(default_factory=list)  # mean of each part of the time
    descriptors: list[int] = field(default_factory=list)  # most in each part

    def __str__(self) -> str:
        memory = " ".join(f"{value:.0f}" for value in self.megabytes)
        descriptors = " ".join(map(str, self.descriptors))
        return (
            f"{self.minutes:.1f} min, {self.cpu:.0f} s of CPU: {self.steps} steps, {self.calls:.0f} calls, "
            f"{self.lost:.0f} lost attempts, {self.broken:.0f} broken games\n"
            f"memory in MB: {memory}; descriptors: {descriptors}; exit code {self.exit_code}"
        )


def sample(pid: int) -> Sample | None:
    """Resident memory and open descriptors of a process; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return Sample(int(status.split("VmRSS:")[1].split()[0]) / 1e3, len(os.listdir(f"/proc/{pid}/fd")))
    except (OSError, IndexError):
        return None


def in_parts(samples: list[Sample]) -> list[list[Sample]]:
    """The samples in PARTS runs of equal length."""
    bounds = [len(samples) * number // PARTS for number in range(PARTS + 1)]
    return [samples[start:stop] for start, stop in pairwise(bounds) if stop > start]


def soak(minutes: float, *, fail: float, folder: Path, flags: list[str]) -> Soak:
    """Train for some minutes after the first step, then stop with SIGTERM."""
    run = folder / "run"
    with served_mini_world(latency=0.05, fail=fail) as url:
        line = [sys.executable, str(SCRIPT), "--env", f"mini@{url}", "--journal", "live"]
        line += ["--env-timeout", "10", "--steps", "1000000", "--out", str(run), *flags]
        before = os.times().children_user + os.times().children_system
        with subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL) as process:
            try:
                while process.poll() is None and not _has_a_step(run):
                    time.sleep(1)
                begin, samples = time.monotonic(), list[Sample]()
                while process.poll() is None and time.monotonic() < begin + 60 * minutes:
                    time.sleep(1)
                    if (now := sample(process.pid)) is not None:
                        samples.append(now)
                seconds = time.monotonic() - begin
                process.send_signal(signal.SIGTERM)
                process.wait()
            finally:
                process.kill()  # has no effect on one that has ended
        cpu = os.times().children_user + os.times().children_system - before
    steps = [line for line in read_metrics(run) if line["step"]] if run.is_dir() else []
    parts = in_parts(samples)
    return Soak(
        minutes=seconds / 60,
        steps=len(steps),
        calls=sum(line["env/calls"] for line in steps),
        lost=sum(line["env/lost"] for line in steps),
        broken=sum(line["env/errors"] for line in steps),
        cpu=cpu,
        exit_code=process.returncode,
        megabytes=[statistics.mean(one.megabytes for one in part) for part in parts],
        descriptors=[max(one.descriptors for one in part) for part in parts],
    )


def _has_a_step(run: Path) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and len(path.read_bytes().splitlines()) > 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="length of the training (20)")
    parser.add_argument("--fail", type=float, default=0.1, help="share of requests that get a fault (0.1)")
    parser.add_argument("--out", default="", help="folder that keeps the run (default: a temporary one)")
    choice, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(choice.out or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        done = soak(choice.minutes, fail=choice.fail, folder=folder, flags=flags)
    print(done)
    print(json.dumps(asdict(done)))


if __name__ == "__main__":
    main()
