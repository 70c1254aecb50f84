"""Ranks without torchrun: on a CPU a run uses several cores by forking its process.

With the mini agent, several threads in one rank are no substitute, because its operations are too short to
divide. With SmolLM2, threads are faster than ranks, and the weights are in memory only once.
"""

import ctypes
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from types import FrameType
from typing import TextIO

from prompt_r1.errors import UsageError
from prompt_r1.model.distributed import RankLost
from prompt_r1.model.machine import pick_device, usable_cores
from prompt_r1.training.signals import unignored_signals

# Without --ranks, each rank gets at least this many questions of a step, because a rank that plays few
# games at once decodes them slowly.
QUESTIONS_PER_RANK = 4
RESUMES = "the same command resumes from the last checkpoint"
PR_SET_PDEATHSIG = 1  # An option of prctl(2): which signal a process gets when its parent ends.


def fork_ranks(count: int) -> None:
    """Fork the ranks of a run, and return in each of them. If the run has one rank, this process is it.

    Otherwise this process does not return: it forwards signals to the ranks, and exits with the code of rank
    0. The ranks share the memory of what it has imported. Raises UsageError if the system allows no more
    processes.
    """
    if count == 1:
        return
    ranks = fork(count)
    if ranks:
        sys.exit(wait_for_ranks(ranks))


def rank_count(wanted: int, *, device: str, questions: int) -> int:
    """How many ranks this process becomes. `wanted` is --ranks, and a step has this many questions.

    `wanted` 0: one for each usable core, but at most one for each QUESTIONS_PER_RANK questions. Raises
    UsageError if several are wanted where nothing can be forked.
    """
    if os.environ.get("WORLD_SIZE"):  # torchrun or Slurm has started the ranks.
        return 1
    # Outside Linux a fork of a process with torch may crash.
    if pick_device(device).type == "cuda" or sys.platform != "linux":
        if wanted > 1:
            raise UsageError(
                f"--ranks {wanted} is for CPUs, on Linux; on GPUs start torchrun --nproc-per-node {wanted} "
                "train.py …"
            )
        return 1
    return wanted or max(1, min(usable_cores(), questions // QUESTIONS_PER_RANK))


def fork(count: int) -> dict[int, TextIO]:
    """Fork `count` ranks. Returns {} in each of them.

    In this process, returns the process id of each rank, in their order, with the file that takes the stderr
    of the rank. (Rank 0 prints on the terminal instead.) Raises UsageError if the system allows no more
    processes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What waits in the buffers would be printed once by each process.
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: dict[int, TextIO] = {}
    for rank in range(count):
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            process = os.fork()
        except OSError as error:  # A container may limit the number of its processes.
            errors.close()
            raise UsageError(f"rank {rank} cannot be forked: {error.strerror}; give fewer --ranks") from None
        if process == 0:
            become_rank(rank, count, port, errors)
            return {}
        ranks[process] = errors
    return ranks


def become_rank(rank: int, count: int, port: int, errors: TextIO) -> None:
    """Give this process the environment variables that torchrun would set. Only rank 0 prints."""
    # If its parent is killed, the kernel kills the rank. Otherwise it would go on to play until its next
    # collective, and the resumed run would pay for the same calls.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # The host name of a laptop may have no address.
    if rank > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(errors.fileno(), 2)


def wait_for_ranks(ranks: Mapping[int, TextIO]) -> int:
    """Wait until rank 0 has ended, and return its exit code. Forwards signals meanwhile.

    If rank 0 has succeeded, this waits for the other ranks. If rank 0 has failed, it does not wait for them:
    the kernel kills them when this process exits. Raises RankLost if rank 0 was killed, or if another rank
    fails after rank 0 has succeeded.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            try:
                os.kill(process, number)
            except ProcessLookupError:  # This rank has ended.
                continue

    for number in unignored_signals():
        signal.signal(number, forward)
    first, *_ = ranks
    _, status = os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        raise RankLost(f"rank 0 was killed by {signal.Signals(-code).name}: {RESUMES}")
    if code == 0:
        wait_for_others(ranks)
    else:
        show_other_failures(ranks, code)
    return code


def wait_for_others(ranks: Mapping[int, TextIO]) -> None:
    """Wait until all ranks after rank 0 have ended. Raises RankLost if one fails, and prints its stderr."""
    _, *others = ranks
    for rank, process in enumerate(others, start=1):
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            print_errors(ranks[process])
            raise RankLost(f"rank {rank} failed when the run had ended (exit code {code}): {RESUMES}")


def show_other_failures(ranks: Mapping[int, TextIO], code: int) -> None:
    """Print the stderr of each rank that has already failed with a different exit code than rank 0.

    Such a rank may be the cause. `code` is the exit code of rank 0.
    """
    _, *others = ranks
    for process in others:
        ended, status = os.waitpid(process, os.WNOHANG)  # `ended` is 0 if the rank still runs.
        if ended and os.waitstatus_to_exitcode(status) not in (0, code):
            print_errors(ranks[process])


def print_errors(errors: TextIO) -> None:
    """Print what a rank wrote to its stderr."""
    errors.seek(0)
    sys.stderr.write(errors.read())
