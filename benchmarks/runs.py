"""What the benchmarks of rollouts measure of a run, and how they print it."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.workload import Totals

PARTS = ("prefill", "decode", "waiting")
Tokens = list[list[int]]  # what each game sampled


@dataclass
class Run:
    """One way to play the games, once."""

    tokens: Tokens
    wall: float = 0.0
    cpu: float = 0.0
    waiting: float = 0.0  # seconds in which every game that was left waited for its environment
    prefill: float = 0.0  # seconds of forwards with prompt tokens in them
    decode: float = 0.0  # seconds of forwards without
    peak: float = 0.0  # MB above what was there before
    prefilled: int = 0


def clock() -> float:
    """Seconds; the work that was given to a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(play: Callable[[], Run]) -> Run:
    """Play, with wall time, CPU time of the process and peak memory."""
    gc.collect()  # an engine and its graphs know each other: its cache would still be there
    before = memory(reset=True)
    wall, cpu = clock(), time.process_time()
    run = play()
    run.wall, run.cpu = clock() - wall, time.process_time() - cpu
    run.peak = memory() - before
    return run


def memory(*, reset: bool = False) -> float:
    """Peak resident (Linux) or allocated (CUDA) memory since the last reset, MB."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 1e6
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3


def compare(variants: dict[str, Callable[[], Run]], rounds: int) -> dict[str, list[Run]]:
    """Alternate, so that what else the machine does hits all of them."""
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, play in variants.items():
            runs[name].append(measured(play))
            run = runs[name][-1]
            print(f"  round {number + 1}  {name:<42} {run.wall:7.2f} s wall {run.cpu:7.2f} s CPU", flush=True)
    return runs


def typical(runs: list[Run], field: str) -> float:
    return median(getattr(run, field) for run in runs)


def table(runs: dict[str, list[Run]], work: Totals, first: str) -> str:
    """One line a variant, medians; the shares of prefill, decode and waiting are of the wall time."""
    reference = typical(runs[first], "wall")
    columns = " wall s   CPU s   tok/s  ratio  peak MB  prefill  decode waiting"
    lines = [f"{'':<42} {columns}"]
    for name, ran in runs.items():
        wall = typical(ran, "wall")
        known = typical(ran, "decode") > 0
        parts = [f"{typical(ran, part) / wall:.0%}" if known else "-" for part in PARTS]
        numbers = (
            f"{wall:7.2f} {typical(ran, 'cpu'):7.2f} {work.new_tokens / wall:7.0f} {wall / reference:6.2f}"
        )
        lines.append(
            f"{name:<42} {numbers} {typical(ran, 'peak'):8.0f} " + " ".join(f"{p:>7}" for p in parts)
        )
    return "\n".join(lines)
