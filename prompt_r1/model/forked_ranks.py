"""Ranks without torchrun: on a CPU a run uses several cores by forking its process.

With the mini agent, several threads in one rank are no substitute, because its operations are too short to
divide. With SmolLM2, threads are faster than ranks, and the weights are in memory only once.
"""

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from prompt_r1.errors import UsageError
from prompt_r1.model.distributed import RankLost, pick_device
from prompt_r1.model.machine import limit_threads, usable_cores

# Without --ranks, each rank gets at least this many questions of a step, because a rank that plays few
# games at once decodes them slowly.
QUESTIONS_PER_RANK = 4


@contextmanager
def forked_ranks(wanted: int, *, device: str, questions: int) -> Iterator[list[int]]:
    """Fork this process into the ranks of a run. The context is entered in every one of them.

    `wanted` is --ranks, `device` is --device, and `questions` is the number of questions of a step.

    - The forks have the environment variables that torchrun would set, and share the memory of what this
      process has imported.
    - Only rank 0 prints. If it loses another rank, it prints what the other ranks wrote to stderr.
    - The forks end when rank 0 ends, even if it was killed.

    Yields the ids of the forks on rank 0, and [] on the others. Raises UsageError if there can be no forks,
    and RankLost on rank 0 if a fork fails after its work.
    """
    count = rank_count(wanted, device=device, questions=questions)
    if count == 1:
        limit_threads()
        yield []
        return
    forks = fork(count)
    limit_threads(ranks=count)
    try:
        yield list(forks)
        wait_for_end(forks)
    except RankLost:
        for errors in forks.values():
            errors.seek(0)
            sys.stderr.write(errors.read())
        raise


def rank_count(wanted: int, *, device: str, questions: int) -> int:
    """How many ranks this process becomes.

    `wanted` 0: one for each usable core, but at most one for each QUESTIONS_PER_RANK questions. Raises
    UsageError for several ranks on GPUs.
    """
    if os.environ.get("WORLD_SIZE"):  # torchrun or Slurm has started the ranks.
        return 1
    if pick_device(device).type == "cuda":
        if wanted > 1:
            raise UsageError(
                f"--ranks {wanted} is for CPUs; on GPUs start torchrun --nproc-per-node {wanted} train.py …"
            )
        return 1
    if wanted:
        return wanted
    if sys.platform != "linux":  # Elsewhere a fork of a process with torch may crash.
        return 1
    return max(1, min(usable_cores(), questions // QUESTIONS_PER_RANK))


def fork(count: int) -> dict[int, TextIO]:
    """Fork ranks 1 to `count` - 1 from this process, which becomes rank 0.

    Returns on rank 0 the ids of the processes with the files that take their stderr, and {} on the others.
    Raises UsageError if the system allows no more processes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # The host name of a laptop may have no address.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    # What waits in the buffers would be printed once by each process.
    sys.stdout.flush()
    sys.stderr.flush()
    # Only rank 0 keeps the write end open, and it writes nothing. So when rank 0 ends, the readers wake up.
    read_end, write_end = os.pipe()
    forks: dict[int, TextIO] = {}
    for rank in range(1, count):
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            process = os.fork()
        except OSError as error:  # A container may limit the number of its processes.
            errors.close()
            raise UsageError(f"rank {rank} cannot be forked: {error.strerror}; give fewer --ranks") from None
        if process == 0:
            os.close(write_end)
            threading.Thread(target=end_with_rank_0, args=(read_end,), daemon=True).start()
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(errors.fileno(), 2)
            return {}
        forks[process] = errors
    return forks


def end_with_rank_0(pipe: int) -> None:
    """Wait until rank 0 has closed its end of the pipe, and then end this process at once.

    Otherwise, after a kill of rank 0, this process would go on to play until its next collective, and the
    resumed run would pay for the same calls.
    """
    os.read(pipe, 1)
    os._exit(1)


def wait_for_end(forks: Iterable[int]) -> None:
    """Wait until the other ranks have exited. Raises RankLost if one of them has failed."""
    for rank, process in enumerate(forks, start=1):
        _, status = os.waitpid(process, 0)
        if status:
            code = os.waitstatus_to_exitcode(status)
            raise RankLost(f"rank {rank} failed when the run had ended (exit code {code})")
