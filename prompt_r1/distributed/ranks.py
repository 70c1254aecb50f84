"""Ranks: the processes that torchrun starts (one without it), and the few collectives of training.

Every collective is called by all ranks or by none.
"""

import asyncio
import os
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prompt_r1.distributed.fsdp import full_tensor
from prompt_r1.errors import FatalEnvError, Resumable, UsageError

T = TypeVar("T")

SHARDED = ("fsdp", "hsdp")  # ways to be parallel


class RankLost(Resumable):
    """The others cannot act together any more, not even to save: the last checkpoint counts."""


@dataclass(frozen=True)
class Ranks:
    """This process among its equals: number `rank` of `count`."""

    rank: int
    count: int
    device: torch.device
    mesh: DeviceMesh | None = None  # over which weights are sharded; None: every rank has all of them
    meeting: dist.ProcessGroup | None = None  # where it is told which rank is missing
    patience: float = 3600.0  # seconds that a rank waits for another

    @property
    def first(self) -> bool:
        """Rank 0 writes files and talks to the user."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over the ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.count > 1:
            dist.all_reduce(total)
        return total.tolist()

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maxima over the ranks, in float64."""
        top = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.count > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX)
        return top.tolist()

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 made, on every rank; the others wait for it."""
        items: list[T | None] = [make() if self.first else None]
        if self.count > 1:
            dist.broadcast_object_list(items, device=self.device)
        return items[0]  # type: ignore[return-value]

    def gather(self, item: T) -> list[T]:
        """Every rank's item, in the order of the ranks, on every rank."""
        if self.count == 1:
            return [item]
        items: list[T] = [item] * self.count
        dist.all_gather_object(items, item)
        return items

    def sum_gradients(self, module: nn.Module) -> None:
        """Add up gradients over the ranks: the loss is a weighted sum over all of them, so the sum is exact.

        One flat all-reduce after the last micro-batch, instead of DDP's hooks in every backward. Those of
        sharded weights were added up in each backward.
        """
        if self.count == 1 or self.mesh is not None:
            return
        gradients = [_gradient(parameter) for parameter in module.parameters() if parameter.requires_grad]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        _copy_back(flat, gradients)

    def clip_gradients(self, module: nn.Module, limit: float) -> float:
        """Scale the gradients down to a norm of `limit`; the norm before, over all weights and ranks."""
        return full_tensor(nn.utils.clip_grad_norm_(module.parameters(), limit)).item()

    def meet(self) -> None:
        """Wait for all ranks, after work that may take long on one of them."""
        if self.meeting is None:
            return
        try:
            dist.monitored_barrier(self.meeting, timedelta(seconds=self.patience), wait_all_ranks=True)
        except RuntimeError as error:
            missing = re.search(r"Ranks ([\d, ]+) failed", str(error))  # rank 0 knows who
            named = f"rank {missing.group(1)}" if missing else "another rank"
            raise RankLost(f"{named} did not come: it hangs, or has died; the same command goes on from the "
                           "last checkpoint") from None  # fmt: skip

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.count > 1:
            dist.barrier()


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:  # this rank had nothing to train on
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _copy_back(flat: Tensor, gradients: Iterable[Tensor]) -> None:
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def pick_device(name: str) -> torch.device:
    """The device called auto (a GPU when there is one), cuda (this process's GPU) or cpu, or UsageError."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    try:
        device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        raise UsageError(f"--device {name}: no such device; choose auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this machine has no usable GPU; choose cpu")
    return torch.device("cuda", local_rank) if device.type == "cuda" and device.index is None else device


def start_ranks(device: str, parallel: str = "auto", *, patience: float = 3600.0) -> Ranks:
    """Join the process group that torchrun announces; without torchrun be the only rank.

    A rank that waits `patience` seconds for another gives up. Raises UsageError for a `parallel` that these
    processes cannot do.
    """
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = pick_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    way = choose_parallel(parallel, count, place)
    # With a GPU, gloo too: weights that are kept in CPU memory have their norm there.
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    meeting = None
    if count > 1:
        dist.init_process_group(backend, timeout=timedelta(seconds=patience))
        meeting = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
    elif way in SHARDED:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Ranks(rank, count, place, make_mesh(way, count, place), meeting, patience)


def choose_parallel(name: str, count: int, device: torch.device) -> str:
    """What `auto` means: none on one process, fsdp on several GPUs, ddp on several CPU processes."""
    if name == "none" and count > 1:
        raise UsageError(f"--parallel none is for one process, and torchrun started {count}: "
                         "choose ddp, fsdp, hsdp or auto")  # fmt: skip
    if name != "auto":
        return name
    return "none" if count == 1 else "fsdp" if device.type == "cuda" else "ddp"


def make_mesh(way: str, count: int, device: torch.device) -> DeviceMesh | None:
    """The ranks as fsdp and hsdp shard over them: in a row, or each row a node (torchrun says how large)."""
    if way not in SHARDED:
        return None
    if way == "fsdp":
        return init_device_mesh(device.type, (count,), mesh_dim_names=("shard",))
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    if count % on_node:
        raise UsageError(f"--parallel hsdp needs equal nodes: {count} processes, {on_node} of them here")
    return init_device_mesh(device.type, (count // on_node, on_node), mesh_dim_names=("replicate", "shard"))


def stop_ranks(ranks: Ranks) -> None:
    """Leave the process group in step: without the barrier gloo can abort after correct work."""
    if ranks.count > 1 or ranks.mesh is not None:
        dist.barrier()
        dist.destroy_process_group()


def assign_questions(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Questions of these lengths, by number, for each of `count` ranks, so that all play about as long.

    Of every `count` questions each rank gets one, and so its share of every mini-batch: the longest goes to
    the rank with the shortest ones so far.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    for start in range(0, len(lengths), count):
        numbers = sorted(range(start, min(start + count, len(lengths))), key=lambda number: -lengths[number])
        least_first = sorted(shares, key=lambda share: sum(lengths[number] for number in share))
        for share, number in zip(least_first, numbers, strict=False):
            share.append(number)
    return shares


def run_on_all_ranks(work: Coroutine[None, None, T], runner: asyncio.Runner, ranks: Ranks) -> T:
    """Run a rank's share of some work with the environment. Where it stops one rank it stops all of them:
    none waits in a collective for one that has left. Called by every rank. Raises RankLost where one does not
    come in time.
    """
    failures: list[FatalEnvError | Resumable | UsageError] = []
    results: list[T] = []

    async def kept() -> None:  # the runner would write out the whole result, as the repr of its task
        results.append(await work)

    try:
        runner.run(kept())
    except (FatalEnvError, Resumable, UsageError) as error:
        failures.append(error)
    ranks.meet()
    failures = [failure for share in ranks.gather(failures) for failure in share]
    if failures:
        raise failures[0]
    return results[0]


def try_first(ranks: Ranks, work: Callable[[], object]) -> str:
    """Do something with files on the first rank; on every rank "", or in a few words why it failed."""

    def attempt() -> str:
        try:
            work()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    return ranks.from_first(attempt)


def cpu_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """A group of all ranks for work on the CPU beside training; None for one rank."""
    return dist.new_group(backend="gloo") if ranks.count > 1 else None
