"""How much waiting does `--ahead 1` hide?

    OMP_NUM_THREADS=1 python -m benchmarks.ahead --latency 0.5 [--virtual] [--seeds 0 1 2] [--steps 10]

Trains the mini agent with the mini world, whose replies take a median of `--latency` seconds (their
distribution is log-normal, so one in a hundred takes ten times as long), without and with `--ahead 1`,
alternately. As in the paper preset, a step has ten optimiser steps, a micro-batch two games of the greatest
length, and activations are recomputed. The last line is JSON.

With `--virtual`, time advances by the CPU time of the process and, where it would wait, jumps to the next
reply. So other programs on the machine hardly matter, and waiting takes no time.

A step is measured from the second to the one before the last: the first waits for all its games in both, and
the last waits for none. Choose the latency so that waiting has the share of a synchronous step that interests
you.
"""

import argparse
import asyncio
import json
import math
import random
import selectors
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean, median

import train
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.world import make_world
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training import event_loop
from prompt_r1.training.ahead import Rollout
from prompt_r1.types import Message

SETTINGS = """
    --config mini --env py:benchmarks.ahead:ENVIRONMENT --val-data none --test-data none --journal live
    --tokens-per-batch 640 --checkpointing true --env-concurrency 1000
""".split()
SIGMA = 1.0  # of the logarithm of a latency


class SlowEnvironment:
    """The mini world, with latencies."""

    def start(self, seed: int, latency: float) -> None:
        """Begin a run."""
        self._environment = MiniEnvironment(make_world(seed), seed=seed)
        self._latency = latency
        self._asked: Counter[str] = Counter()

    async def ask(self, messages: list[Message]) -> str:
        """Reply after a time that depends on the messages, and on how often they were sent before."""
        text = str(messages)
        self._asked[text] += 1
        draw = random.Random(f"{text} {self._asked[text]}").gauss(0, SIGMA)
        await asyncio.sleep(self._latency * math.exp(draw))
        return await self._environment.ask(messages)


@dataclass
class Clock:
    """Real time or, if virtual, the CPU time of this process and the waiting that was skipped."""

    virtual: bool = False
    waited: float = 0.0  # seconds in which nothing computed

    def now(self) -> float:
        return time.process_time() + self.waited if self.virtual else time.monotonic()


ENVIRONMENT = SlowEnvironment()
CLOCK = Clock()


class TimedSelector(event_loop._IdleSelector):
    """Waits by the clock."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.idle is not None or timeout == 0:
            return super().select(timeout)
        if CLOCK.virtual and timeout is not None:
            CLOCK.waited += timeout
            return super().select(0)
        begin = time.monotonic()
        try:
            return super().select(timeout)
        finally:
            CLOCK.waited += time.monotonic() - begin


class TimedLoop(event_loop.SlicedLoop):
    """Its clock runs while the loop does not, because the latencies are its timers here."""

    def time(self) -> float:
        return CLOCK.now()


@dataclass(frozen=True)
class Measured:
    """A training: means in seconds over its steps, without the first and the last."""

    seed: int
    ahead: int
    step: float
    waiting: float  # without any computation
    update: float  # with the decoding of games that go on meanwhile
    games: float  # from the beginning of a step's first game to the end of its last one


def measure(folder: Path, *, seed: int, latency: float, ahead: int, flags: list[str]) -> Measured:
    """Train in this process."""
    ENVIRONMENT.start(seed, latency)
    marks: list[tuple[float, float]] = []  # at the beginning of each step
    games_of = train.Run.games_of

    def marked(run: train.Run, step: int) -> Rollout:
        marks.append((CLOCK.now(), CLOCK.waited))
        return games_of(run, step)

    train.Run.games_of = marked  # type: ignore[method-assign]
    try:
        with redirect_stdout(StringIO()):
            train.main([*SETTINGS, *flags, "--seed", str(seed), "--ahead", str(ahead), "--out", str(folder)])
    finally:
        train.Run.games_of = games_of  # type: ignore[method-assign]
    lines = read_metrics(folder)[2:-1]
    step, waiting = ((last - first) / len(lines) for first, last in zip(marks[1], marks[-1], strict=True))
    update = fmean(line["time/update"] for line in lines)
    return Measured(
        seed, ahead, step, waiting, update, fmean(line["games"] / line["games/s"] for line in lines)
    )


def main(arguments: list[str]) -> None:
    """Measure all seeds, and print a table."""
    parser = argparse.ArgumentParser(description="How much waiting does --ahead 1 hide?")
    parser.add_argument("--latency", type=float, required=True, help="median seconds of a reply")
    parser.add_argument("--virtual", action="store_true", help="CPU time, and waiting that is skipped")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--questions", type=int, default=16)
    given = parser.parse_args(arguments)
    CLOCK.virtual = given.virtual
    time.perf_counter = CLOCK.now
    event_loop._IdleSelector = TimedSelector  # type: ignore[misc]
    asyncio.Runner = lambda loop_factory=None: RUNNER(loop_factory=TimedLoop)  # type: ignore[misc,assignment]
    flags = ["--steps", str(given.steps), "--questions", str(given.questions)]
    flags += ["--mini-batch", str(given.questions // 2)]  # of 5 games for each question
    runs: list[Measured] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as out:
        for seed in given.seeds:
            pair = []
            for ahead in (0, 1):
                folder = Path(out) / f"seed{seed}-ahead{ahead}"
                pair.append(measure(folder, seed=seed, latency=given.latency, ahead=ahead, flags=flags))
                print(pair[-1], flush=True)
            runs += pair
            cells = [f"{run.step:.2f}" for run in pair] + [f"{pair[1].step / pair[0].step:.2f}"]
            cells += [f"{run.waiting / run.step:.0%}" for run in pair]
            cells += [f"{run.step - run.waiting:.2f}" for run in pair]
            rows.append([str(seed), *cells, f"{pair[0].games:.2f}", f"{pair[0].update:.2f}"])
    header = ["seed", "s/step", "ahead", "ratio", "waiting", "ahead", "computing s/step", "ahead"]
    print("\n" + markdown_table([*header, "games s", "update s"], rows, left=1))
    ratio = median(float(row[3]) for row in rows)
    print(json.dumps({"ratio": ratio, "runs": [asdict(run) for run in runs]}))


RUNNER = asyncio.Runner

if __name__ == "__main__":
    import benchmarks.ahead  # the module whose ENVIRONMENT `py:` finds, not __main__

    benchmarks.ahead.main(sys.argv[1:])
