"""What this process may use of its machine: its device, cores, threads and memory."""

import os
import sys
from pathlib import Path

import torch

from prompt_r1.errors import UsageError
from prompt_r1.programs.launcher import check_device, has_other_ranks, launcher_number

# Linux limits groups of processes, which form a tree (cgroup v2). A container is such a group, and so is a
# job of Slurm. Each group has a folder with its limits and with what its processes use.
CGROUPS = Path("/sys/fs/cgroup")  # the root of the tree; in a container usually the container itself
OWN_CGROUP = Path("/proc/self/cgroup")  # says in which group this process is
# The number of threads that torch chooses, read before anything sets another one. It follows affinity and
# OMP_NUM_THREADS, but not the limit of a cgroup.
TORCH_THREADS = torch.get_num_threads()


def usable_cores() -> int:
    """The number of cores for this process: by its affinity, its cgroups, and OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for group in _own_cgroups():
        limit = group / "cpu.max"
        if limit.exists():
            # It has two numbers, both in microseconds: the CPU time (or "max") per period, and the period.
            time, _, period = limit.read_text().partition(" ")
            if time != "max":
                cores = min(cores, max(1, int(time) // int(period)))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > 0:
        cores = min(cores, int(threads))
    return cores


def use_threads(flag: int = 0, *, in_training: int = 0, ranks: int = 1) -> None:
    """Set the number of threads in which torch computes from now on.

        flag          --threads, which may exceed the number of cores; 0: not given
        in_training   --threads of the agent's training; 0: as many as torch chooses
        ranks         how many ranks share the cores

    Without the flag, a rank has no more threads than cores: an agent may have been trained on a larger
    machine, and torch does not know the limit of a cgroup. If more threads computed than this limit allows,
    the kernel would stop all of them for most of each period.
    """
    wanted = in_training or TORCH_THREADS
    torch.set_num_threads(flag or max(1, min(wanted, usable_cores() // ranks)))


def pick_device(name: str) -> torch.device:
    """Return the device that --device names.

    The names are auto (a GPU if there is one), cuda (the GPU of this process), cuda:N and cpu. The GPU of a
    process has the number of the process's local rank. If the launcher shows each process only one GPU, as
    Slurm does by CUDA_VISIBLE_DEVICES, this GPU has number 0. Raises UsageError for any other name, for
    cuda:N with several ranks on a machine, and if there is no GPU for this process.
    """
    check_device(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this machine has no usable GPU; choose cpu")
    # Batches vary in size: expandable segments fragment less of the allocator's memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    visible = torch.cuda.device_count()
    if ":" in name:
        number = int(name.partition(":")[2])
    elif visible == 1:
        number = 0
    elif has_other_ranks() and not os.environ.get("LOCAL_RANK"):
        raise UsageError(
            f"LOCAL_RANK does not say which of {visible} GPUs this process takes: start with torchrun, or "
            "set it (in a task of Slurm: LOCAL_RANK=$SLURM_LOCALID)"
        )
    else:
        number = launcher_number("LOCAL_RANK", default=0)
    if number >= visible:
        raise UsageError(
            f"--device {name}: there is no GPU {number}: this process sees {visible}, from cuda:0 on; start "
            "as many processes as there are GPUs, or show each process one GPU of its own"
        )
    return torch.device("cuda", number)


def memory_left(device: torch.device) -> int:
    """The bytes that this process can still allocate on a device.

    On a GPU, room is kept for the next update. It needs as much memory as the peak since `forget_peak`. So
    we subtract the peak, not the memory in use, from all that the process can have. A training therefore
    takes its memory in this order:

        1. load_policy       forgets the peak of earlier models, and loads the weights
        2. make_optimizer    makes the states of AdamW
        3. warm_up           computes one micro-batch of full size, which makes the peak
        4. Agent.engine      makes the KV cache, which takes a share of what is left

    On a CPU, the ranks of one machine load their models at the same time, so each has its share of the memory
    that the host and the limits of cgroups leave.
    """
    if device.type == "cuda":
        # torch keeps `reserved` bytes for this process, so it can have `free + reserved` in all.
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
        return free + reserved - peak
    try:  # MemAvailable counts the memory that the page cache can give back (see proc(5)).
        _, _, after_name = Path("/proc/meminfo").read_text().partition("MemAvailable:")
        kilobytes = after_name.split()[0]
        available = 1024 * int(kilobytes)
    except (OSError, IndexError):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = min(available, _left_in_cgroups())
    return available // launcher_number("LOCAL_WORLD_SIZE", default=1)


def forget_peak(device: torch.device) -> None:
    """Forget the peak of this process on a GPU: `memory_left` keeps no room for it any more."""
    if device.type == "cuda":
        torch.cuda.init()  # Without it, torch refuses to reset the peak.
        torch.cuda.reset_peak_memory_stats(device)


def _left_in_cgroups() -> int:
    """The bytes that this process's cgroups let it allocate; sys.maxsize if none of them has a limit.

    The kernel gives the page cache of a group back before the group exceeds its limit.
    """
    left = sys.maxsize
    for group in _own_cgroups():
        limit = group / "memory.max"
        if not limit.exists() or limit.read_text() == "max\n":
            continue
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        parts = dict(line.split() for line in lines)
        page_cache = int(parts["active_file"]) + int(parts["inactive_file"])
        left = min(left, int(limit.read_text()) - used + page_cache)
    return left


def _own_cgroups() -> list[Path]:
    """The folders of this process's cgroup and of the groups around it. All of their limits hold."""
    own = CGROUPS
    if OWN_CGROUP.exists():
        for line in OWN_CGROUP.read_text().splitlines():
            if line.startswith("0::/"):  # The other lines are about cgroup v1.
                own = CGROUPS / line.removeprefix("0::/")
    return [group for group in (own, *own.parents) if group.is_relative_to(CGROUPS)]
