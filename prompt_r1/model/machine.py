"""What this process may use of its machine: cores, threads and memory."""

import os
import sys
from pathlib import Path

import torch

from prompt_r1.programs.launcher import launcher_number

CONTAINER = Path("/sys/fs/cgroup")  # the limits of a container, and what it uses (cgroup v2)


def usable_cores() -> int:
    """The number of cores for this process: by its affinity, its container, and OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limit = CONTAINER / "cpu.max"
    if limit.exists():
        # The file has two numbers, both in microseconds: the CPU time (or "max") per period, and the period.
        time, _, period = limit.read_text().partition(" ")
        if time != "max":
            cores = min(cores, max(1, int(time) // int(period)))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(threads)) if threads.isdecimal() and int(threads) else cores


def limit_threads(*, ranks: int = 1) -> None:
    """Let torch compute in no more threads than there are cores for each of `ranks` ranks.

    The number that torch chooses follows affinity and OMP_NUM_THREADS, but not the limit of a container. With
    more threads than that, the container would stop all of them for most of each period.
    """
    torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cores() // ranks)))


def memory_left(device: torch.device) -> int:
    """The bytes that this process can still allocate on a device.

    On a GPU, room is kept for the next update: this is what the process can have in all, minus its peak since
    `forget_peak`, which includes the weights. On a CPU, the ranks of one machine load their models at
    the same time, so each has its share of the memory that the host and the limit of a container leave.
    """
    if device.type == "cuda":
        # torch keeps `reserved` bytes for this process, so it can have `free + reserved` in all.
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
        return free + reserved - peak
    try:  # MemAvailable counts the memory that the page cache can give back (see proc(5)).
        meminfo = Path("/proc/meminfo").read_text()
        available = 1024 * int(meminfo.split("MemAvailable:")[1].split()[0])
    except (OSError, IndexError):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = min(available, _left_in_container())
    return available // launcher_number("LOCAL_WORLD_SIZE", default=1)


def forget_peak(device: torch.device) -> None:
    """Forget the peak of this process on a GPU: `memory_left` keeps no room for it any more.

    Call it before a model is loaded. The first update that follows makes the new peak.
    """
    if device.type == "cuda":
        torch.cuda.init()  # Without it, torch refuses to reset the peak.
        torch.cuda.reset_peak_memory_stats(device)


def _left_in_container() -> int:
    """The bytes that this process's container can still allocate; sys.maxsize if it has no limit.

    The kernel gives the page cache of a container back before the container exceeds its limit.
    """
    limit = CONTAINER / "memory.max"
    if not limit.exists() or limit.read_text() == "max\n":
        return sys.maxsize
    used = int((CONTAINER / "memory.current").read_text())
    lines = (CONTAINER / "memory.stat").read_text().splitlines()
    parts = dict(line.split() for line in lines)
    page_cache = int(parts["active_file"]) + int(parts["inactive_file"])
    return int(limit.read_text()) - used + page_cache
