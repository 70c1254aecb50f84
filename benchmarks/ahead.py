"""How much waiting does `--ahead 1` hide?

    OMP_NUM_THREADS=1 python -m benchmarks.ahead --latency 0.3 [--seeds 0 1 2] [--steps 10] [--out FOLDER]

Trains the mini agent with the served mini world, whose replies take a median of `--latency` seconds (their
distribution is log-normal, so one in a hundred takes ten times as long), without and with `--ahead 1`,
alternately. As in the paper preset, a step has ten optimiser steps, a micro-batch two games of the greatest
length, and activations are recomputed. The last line is JSON.

A step is measured from the second to the one before the last: the first is synchronous in both, and the last
begins no games. Waiting is measured in the event loop: the seconds in which nothing computed. Choose the
latency so that waiting has the share of a synchronous step that interests you.
"""

import argparse
import json
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.storage.run_log import read_metrics

SETTINGS = """
    --config mini --val-data none --test-data none --journal live
    --tokens-per-batch 640 --checkpointing true
""".split()


@dataclass(frozen=True)
class Measured:
    """One training, without its start."""

    seed: int
    ahead: int
    step: float  # mean seconds of a step
    wall: float  # seconds of all steps, the first and the last included
    waiting: float  # of them, without any computation
    hidden: float  # that the update computed while games waited
    cpu: float  # seconds of the process, its start included

    @property
    def share(self) -> float:
        """The share of waiting in the wall time."""
        return self.waiting / self.wall


def train_here(arguments: list[str]) -> None:
    """Train in this process; prints the seconds in which its event loop waited."""
    import train

    waited = 0.0
    select = selectors.DefaultSelector.select

    def timed(self: selectors.DefaultSelector, timeout: float | None = None) -> list:
        nonlocal waited
        begin = time.perf_counter()
        try:
            return select(self, timeout)
        finally:
            waited += 0.0 if timeout == 0 else time.perf_counter() - begin

    selectors.DefaultSelector.select = timed  # type: ignore[method-assign]
    train.main(arguments)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"waiting": waited, "cpu": usage.ru_utime + usage.ru_stime}))


def measure(folder: Path, url: str, *, seed: int, ahead: int, flags: list[str]) -> Measured:
    """Train in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.ahead", "--train", *SETTINGS, "--env", url, *flags]
    command += ["--seed", str(seed), "--ahead", str(ahead), "--out", str(folder)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures = json.loads(output.splitlines()[-1])
    lines = read_metrics(folder)[1:]
    steps = [line["time/rollout"] + line["time/update"] for line in lines]
    hidden = sum(line.get("ahead/hidden", 0.0) for line in lines)
    waiting, cpu = figures["waiting"], figures["cpu"]
    return Measured(seed, ahead, fmean(steps[1:-1]), sum(steps), waiting, hidden, cpu)


def serve(seed: int, latency: float) -> tuple[subprocess.Popen, str]:
    """The mini world of a seed, served by another process, and the name of the environment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "prompt_r1.miniworld.serve", "--port", str(port), "--seed", str(seed)]
    process = subprocess.Popen([*command, "--latency", str(latency)], stdout=subprocess.DEVNULL)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    return process, f"mini@http://127.0.0.1:{port}/v1"


def main(arguments: list[str]) -> None:
    """Measure all seeds, and print a table."""
    parser = argparse.ArgumentParser(description="How much waiting does --ahead 1 hide?")
    parser.add_argument("--latency", type=float, required=True, help="median seconds of a reply")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=1, help="of each seed")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs (a temporary one)")
    given = parser.parse_args(arguments)
    flags = ["--steps", str(given.steps), "--questions", str(given.questions)]
    flags += ["--mini-batch", str(given.questions // 2)]  # of 5 games for each question
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        for number in range(given.rounds):
            for seed in given.seeds:
                server, url = serve(seed, given.latency)
                try:
                    for ahead in (0, 1) if (number + seed) % 2 == 0 else (1, 0):
                        folder = out / f"round{number}-seed{seed}-ahead{ahead}"
                        runs.append(measure(folder, url, seed=seed, ahead=ahead, flags=flags))
                        print(runs[-1], flush=True)
                finally:
                    server.terminate()
                    server.wait()
    rows, ratios = [], []
    for seed in given.seeds:
        both = [[run for run in runs if (run.seed, run.ahead) == (seed, ahead)] for ahead in (0, 1)]
        steps = [median(run.step for run in side) for side in both]
        ratios.append(steps[1] / steps[0])
        cells = [f"{seconds:.1f}" for seconds in steps] + [f"{ratios[-1]:.2f}"]
        cells += [f"{median(run.share for run in side):.0%}" for side in both]
        rows.append([str(seed), *cells, *(f"{median(run.cpu for run in side):.1f}" for side in both)])
    header = ["seed", "s/step", "ahead", "ratio", "waiting", "ahead", "CPU s", "ahead"]
    print("\n" + markdown_table(header, rows, left=1))
    print(json.dumps({"ratio": round(median(ratios), 3), "runs": [asdict(run) for run in runs]}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train_here(sys.argv[2:])
    else:
        main(sys.argv[1:])
