"""What the benchmarks share: flags, the cost of a piece of work, alternating rounds, and the table."""

import argparse
import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from prompt_r1.programs.tables import markdown_table


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the docstring unchanged, and the defaults."""
    return argparse.ArgumentParser(description=description, formatter_class=_Formatter)


@dataclass
class Cost:
    """What a piece of work cost."""

    wall: float = 0.0  # seconds
    cpu: float = 0.0  # CPU seconds of the process
    peak: float = 0.0  # the peak of memory in MB, above the memory before the work


Measured = TypeVar("Measured", bound=Cost)


def clock() -> float:
    """The time in seconds, after the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def memory(*, reset: bool = False) -> float:
    """The peak of memory in MB since the last reset: allocated on a GPU, or resident on a CPU (Linux)."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 1e6
    if reset:
        # Otherwise glibc reuses the memory that it has kept from an earlier round.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3


@contextmanager
def measuring(cost: Cost) -> Iterator[None]:
    """Write the cost of the block into `cost`."""
    gc.collect()  # An engine and its graphs refer to each other, so only the collector frees them.
    before = memory(reset=True)
    wall, cpu = clock(), time.process_time()
    yield
    cost.wall, cost.cpu = clock() - wall, time.process_time() - cpu
    cost.peak = memory() - before


def compare(variants: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Run the variants by turns, in rounds, so that other load on the machine affects all of them."""
    runs: dict[str, list[Measured]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, run in variants.items():
            runs[name].append(run())
            cost = runs[name][-1]
            print(f"  round {number + 1}  {name:<26} {cost.wall:7.2f} s, CPU {cost.cpu:7.2f} s", flush=True)
    return runs


def ratio_to_ours(runs: Mapping[str, list[Cost]], name: str, field: str) -> float:
    """A variant's value of a field divided by our value in the same round, as the median over the rounds."""
    return median(
        getattr(theirs, field) / max(getattr(ours, field), 1e-9)  # A small run may need no new memory.
        for theirs, ours in zip(runs[name], runs["ours"], strict=True)
    )


def table(runs: Mapping[str, list[Cost]]) -> str:
    """A table with the medians of each variant, and their ratios to ours."""
    rows = []
    for name, costs in runs.items():
        cells = [f"{median(getattr(cost, field) for cost in costs):.1f}" for field in ("wall", "cpu", "peak")]
        cells += [f"{ratio_to_ours(runs, name, field):.2f}" for field in ("wall", "cpu", "peak")]
        rows.append([name, *cells])
    return markdown_table(["", "wall s", "CPU s", "extra MB", "wall ×", "CPU ×", "MB ×"], rows)
