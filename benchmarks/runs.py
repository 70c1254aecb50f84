"""Measurements of the rollout benchmarks, and their table."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.workload import Totals

Tokens = list[list[int]]  # the sampled tokens of each game


@dataclass
class PlayedRun:
    """The games, played once by one variant."""

    tokens: Tokens
    wall: float = 0.0  # seconds
    cpu: float = 0.0  # seconds of the process
    waiting: float = 0.0  # seconds in which every unfinished game waited for its environment
    prefill: float = 0.0  # seconds of forwards with prompt tokens
    decode: float = 0.0  # seconds of forwards without
    peak: float = 0.0  # MB above the memory before
    prefilled: int = 0  # prompt tokens computed


def clock() -> float:
    """Seconds, after the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(play: Callable[[], PlayedRun]) -> PlayedRun:
    """Play, and measure wall time, CPU time of the process and peak memory."""
    gc.collect()  # an engine and its graphs refer to each other, so only the collector frees its cache
    before = memory(reset=True)
    wall, cpu = clock(), time.process_time()
    run = play()
    run.wall = clock() - wall
    run.cpu = time.process_time() - cpu
    run.peak = memory() - before
    return run


def memory(*, reset: bool = False) -> float:
    """Peak memory since the last reset in MB: resident (Linux) or allocated (CUDA)."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 1e6
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3


def compare(variants: dict[str, Callable[[], PlayedRun]], rounds: int) -> dict[str, list[PlayedRun]]:
    """Alternate the variants in rounds, so that other load on the machine affects all of them."""
    runs: dict[str, list[PlayedRun]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, play in variants.items():
            run = measured(play)
            runs[name].append(run)
            print(f"  round {number + 1}  {name:<42} {run.wall:7.2f} s wall {run.cpu:7.2f} s CPU", flush=True)
    return runs


def median_of(runs: list[PlayedRun], field: str) -> float:
    """The median of a field over the rounds."""
    return median(getattr(run, field) for run in runs)


def table(runs: dict[str, list[PlayedRun]], work: Totals, first: str) -> str:
    """One line of medians for each variant. Prefill, decode and waiting are shares of the wall time."""
    reference = median_of(runs[first], "wall")
    lines = [f"{'':<42}   wall s   CPU s   tok/s  ratio  peak MB  prefill  decode waiting"]
    for name, played in runs.items():
        wall, cpu, peak = (median_of(played, field) for field in ("wall", "cpu", "peak"))
        timed = median_of(played, "decode") > 0  # variants that do not time their forwards have no shares
        shares = ["-", "-", "-"]
        if timed:
            shares = [f"{median_of(played, part) / wall:.0%}" for part in ("prefill", "decode", "waiting")]
        numbers = f"{wall:7.2f} {cpu:7.2f} {work.new_tokens / wall:7.0f} {wall / reference:6.2f} {peak:8.0f}"
        lines.append(f"{name:<42} {numbers} " + " ".join(f"{share:>7}" for share in shares))
    return "\n".join(lines)
