"""The processes that torchrun starts, and their collectives.

Every collective is called by all ranks or by none.
"""

import asyncio
import os
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prompt_r1.distributed.fsdp import full_tensor
from prompt_r1.errors import FatalEnvError, Resumable, UsageError

T = TypeVar("T")

SHARDED = ("fsdp", "hsdp")  # values of --parallel that shard the weights
# What NCCL and gloo say of connections, not of wrong calls or of the GPU. Their errors share one class.
NETWORK_ERRORS = (
    "ncclRemoteError",
    "ncclSystemError",
    "store->get",
    "Watchdog caught collective",
    "Socket Timeout",
    "Broken pipe",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",  # gloo, of its own receive
    "Application timeout caused pair closure",  # gloo, after another collective has timed out
)


class RankLost(Resumable):
    """A rank is missing or out of reach, so the others cannot even save: the run resumes from its last
    checkpoint.
    """


@dataclass(frozen=True)
class Ranks:
    """This process, number `rank` of `count`, and its collectives."""

    rank: int
    count: int
    device: torch.device
    mesh: DeviceMesh | None = None  # over which weights are sharded; None: every rank has all of them
    monitored_group: dist.ProcessGroup | None = None  # of `wait_for_all`; gloo, which names a missing rank
    timeout: float = 3600.0  # seconds that a rank waits for another

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maxima over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        result = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.count > 1:
            dist.all_reduce(result, op=how)
        return result.tolist()

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0; return its result, or raise its error for the user, on every rank."""
        items: list[T | UsageError | Resumable | FatalEnvError | None] = [None]
        if self.first:
            try:
                items = [make()]
            except (UsageError, Resumable, FatalEnvError) as error:
                items = [error]
        if self.count > 1:
            dist.broadcast_object_list(items, device=self.device)
        if isinstance(items[0], UsageError | Resumable | FatalEnvError):
            self.barrier()  # a rank that left at once could cut off the others while they receive
            raise items[0]
        return items[0]  # type: ignore[return-value]

    def gather(self, item: T) -> list[T]:
        """Every rank's item, in the order of the ranks, on every rank."""
        if self.count == 1:
            return [item]
        items: list[T] = [item] * self.count
        dist.all_gather_object(items, item)
        return items

    def sum_gradients(self, module: nn.Module) -> None:
        """Sum the gradients over the ranks. The loss is a weighted sum over all ranks, so the sum is exact.

        This happens after the last micro-batch, in place of DDP's hooks in every backward. The gradients of
        sharded weights need no sum: FSDP sums them in the backward.
        """
        if self.count == 1 or self.mesh is not None:
            return
        for weight in module.parameters():
            if weight.requires_grad:
                if weight.grad is None:  # no token of this rank used it
                    weight.grad = torch.zeros_like(weight)
                dist.all_reduce(weight.grad)

    def clip_gradients(self, module: nn.Module, limit: float) -> float:
        """Scale the gradients down to a norm of at most `limit`; returns their norm before.

        The norm is over all weights and ranks.
        """
        return full_tensor(nn.utils.clip_grad_norm_(module.parameters(), limit)).item()

    @torch.no_grad()
    def weight_norm(self, module: nn.Module) -> float:
        """The norm of all weights of a module; not finite if any of them is not, or if they overflow it."""
        return full_tensor(nn.utils.get_total_norm(module.parameters())).item()

    def wait_for_all(self) -> None:
        """Wait for all ranks, after work that may take long on one. Raises RankLost at the timeout."""
        if self.monitored_group is None:
            return
        try:
            dist.monitored_barrier(self.monitored_group, timedelta(seconds=self.timeout), wait_all_ranks=True)
        except RuntimeError as error:
            missing = re.search(r"Ranks ([\d, ]+) failed", str(error))  # only rank 0 knows which
            name = f"rank {missing.group(1)}" if missing else "another rank"
            raise RankLost(
                f"{name} did not respond: it hangs or has died; the same command resumes from the last "
                "checkpoint"
            ) from None

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.count > 1:
            dist.barrier()


def pick_device(name: str) -> torch.device:
    """The device called auto (a GPU if there is one), cuda (this process's GPU) or cpu.

    Where a launcher shows each process only its own GPU (CUDA_VISIBLE_DEVICES for each Slurm task), it is
    number 0. Raises UsageError for another name, and where there is no GPU for this process. Called before
    anything is allocated on a GPU, it lets torch's allocator grow its segments, unless the user has
    configured it: batches of changing sizes then leave fewer holes between them.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # which is none either
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: no such device; choose auto, cpu or cuda")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this machine has no usable GPU; choose cpu")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if device.index is not None:
        return device
    local_rank, visible = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if visible == 1:
        return torch.device("cuda", 0)
    if local_rank >= visible:
        raise UsageError(
            f"process {local_rank} of this machine sees {visible} GPUs: start as many processes as there are "
            "GPUs, or show each process one GPU of its own"
        )
    return torch.device("cuda", local_rank)


def start_ranks(device_name: str, parallel: str = "auto", *, timeout: float = 3600.0) -> Ranks:
    """Join the process group of torchrun; without torchrun, this process is the only rank.

    A rank that has waited `timeout` seconds for another gives up. Raises UsageError for a value of `parallel`
    that does not fit the number of processes.
    """
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mode = choose_parallel(parallel, count, device)
    # gloo beside nccl: the norm of weights that are offloaded to CPU memory is computed there.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    monitored_group = None
    if count > 1:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        monitored_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    elif mode in SHARDED:
        dist.init_process_group(
            backend, timeout=timedelta(seconds=timeout), store=dist.HashStore(), rank=0, world_size=1
        )
    mesh = make_mesh(mode, count, device, timeout=timeout)
    return Ranks(rank, count, device, mesh, monitored_group, timeout)


@contextmanager
def network_errors_resumable(ranks: Ranks) -> Iterator[None]:
    """Raise RankLost in place of a collective's network error: another rank has died, hangs or is cut off."""
    try:
        yield
    except RuntimeError as error:
        if ranks.count == 1 or not any(text in str(error) for text in NETWORK_ERRORS):
            raise
        first, _, last = str(error).partition("Last error:")  # where NCCL explains itself
        line = (last.strip() or first.strip()).splitlines()[0]
        raise RankLost(
            f"the ranks could not communicate ({line}): one of them has died or hangs; the same command "
            "resumes from the last checkpoint"
        ) from None


def choose_parallel(name: str, count: int, device: torch.device) -> str:
    """Resolve `auto`: none for one process, fsdp for several GPUs, ddp for several CPU processes."""
    if name == "none" and count > 1:
        raise UsageError(
            f"--parallel none is for one process, and torchrun started {count}: choose ddp, fsdp, hsdp or "
            "auto"
        )
    if name != "auto":
        return name
    if count == 1:
        return "none"
    return "fsdp" if device.type == "cuda" else "ddp"


def make_mesh(mode: str, count: int, device: torch.device, *, timeout: float = 3600.0) -> DeviceMesh | None:
    """The mesh of the ranks: (count,) for fsdp, (nodes, ranks per node) for hsdp, otherwise None.

    Its process groups have the timeout of the group of all ranks, not the default of their backend.
    """
    if mode not in SHARDED:
        return None
    if mode == "fsdp":  # over the group of all ranks itself
        return init_device_mesh(device.type, (count,), mesh_dim_names=("shard",))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", count))  # set by torchrun
    if count % per_node:
        raise UsageError(f"--parallel hsdp needs equal nodes: {count} processes, {per_node} of them here")
    nodes = torch.arange(count).view(-1, per_node)
    limit = timedelta(seconds=timeout)
    replicate, _ = dist.new_subgroups_by_enumeration(nodes.T.tolist(), timeout=limit)
    shard, _ = dist.new_subgroups_by_enumeration(nodes.tolist(), timeout=limit)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([replicate, shard], device.type, mesh=nodes, mesh_dim_names=names)


def stop_ranks(ranks: Ranks) -> None:
    """Leave the process group. Without the barrier, gloo can abort a process whose work was done."""
    if ranks.count > 1 or ranks.mesh is not None:
        dist.barrier()
        dist.destroy_process_group()


def assign_questions(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divide questions of these lengths among `count` ranks; returns the numbers of each rank's questions.

    Of every `count` questions in a row each rank gets one, so that it has a share of every mini-batch. The
    longest of them goes to the rank whose questions are shortest so far, so that all ranks play about as
    long.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    for start in range(0, len(lengths), count):
        numbers = range(start, min(start + count, len(lengths)))
        longest_first = sorted(numbers, key=lambda number: -lengths[number])
        shortest_share_first = sorted(shares, key=lambda share: sum(lengths[number] for number in share))
        for share, number in zip(shortest_share_first, longest_first, strict=False):
            share.append(number)
    return shares


def run_on_all_ranks(work: Coroutine[None, None, T], runner: asyncio.Runner, ranks: Ranks) -> T:
    """Run this rank's share of some asynchronous work, and wait for the other ranks.

    An error on one rank is raised on all of them, so that none waits in a collective for a rank that has
    left. Called by every rank. Raises RankLost if a rank does not finish in time.
    """
    failures: list[FatalEnvError | Resumable | UsageError] = []
    results: list[T] = []

    async def store_result() -> None:
        # Not returned: the runner formats the repr of its task, which would hold the whole result.
        results.append(await work)

    try:
        runner.run(store_result())
    except (FatalEnvError, Resumable, UsageError) as error:
        failures.append(error)
    ranks.wait_for_all()
    failures = [failure for share in ranks.gather(failures) for failure in share]
    if failures:
        raise failures[0]
    return results[0]


def try_first(ranks: Ranks, work: Callable[[], object]) -> str:
    """Do file operations on the first rank. Returns "" on every rank, or why they failed."""

    def attempt() -> str:
        try:
            work()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    return ranks.from_first(attempt)
