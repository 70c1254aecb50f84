"""The ranks of a run (the processes that torchrun starts), and their collectives.

Every collective is called by all ranks or by none.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prompt_r1.errors import Resumable, UsageError, first_line, is_out_of_memory
from prompt_r1.programs.launcher import launcher_number

T = TypeVar("T")

# Gradients are summed over the ranks in buckets of this many numbers: 32 MB in float32.
BUCKET = 2**23


class RankLost(Resumable):
    """A rank cannot be reached, so the others cannot save: the run resumes from its last checkpoint."""


class RankFailed(RuntimeError):
    """What all ranks raise after an unexpected error of one rank."""


@dataclass(frozen=True)
class Ranks:
    """This process, number `rank` of `count`, and its collectives."""

    rank: int
    count: int
    device: torch.device
    mesh: DeviceMesh | None = None  # the ranks over which weights are sharded; None: weights are not sharded

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages."""
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """Return the items of all ranks, in the order of the ranks."""
        if self.count == 1:
            return [item]
        items: list[T] = [item] * self.count
        dist.all_gather_object(items, item)
        return items

    def gather_lists(self, items: list[T]) -> list[T]:
        """Return the lists of all ranks as one list, in the order of the ranks."""
        return [item for share in self.gather(items) for item in share]

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's part of a list that all ranks have. `gather_lists` restores the list."""
        begin = self.rank * len(items) // self.count
        end = (self.rank + 1) * len(items) // self.count
        return items[begin:end]

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """A context for this rank's share of some work. At its end, this rank waits for the other ranks.

        If the work fails on one rank, its error is raised on all of them. Otherwise the others would wait in
        their next collective for a rank that has left. An unexpected error becomes RankFailed with the
        original traceback (`as_shared`). Contexts may be nested.
        """
        if self.count == 1:
            yield
            return
        shared: Exception | None = None
        try:
            yield
        except Exception as error:
            shared = as_shared(error, self.rank)
        failures = [error for error in self.gather(shared) if error is not None]
        if failures:
            # A rank that leaves at once can break the connection while others still receive the error.
            self.barrier()
            raise failures[0] from None  # A note of the error has the traceback.

    def on_first_rank(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, and return its result or raise its error on every rank."""
        with self.shared_errors():
            made = make() if self.is_first else None
        return self.gather(made)[0]  # type: ignore[return-value]

    def sum_gradients(self, module: nn.Module) -> None:
        """Sum the gradients over the ranks, after the last micro-batch.

        The loss of a step is the sum of the ranks' losses, so its gradient is the sum of their gradients. DDP
        would sum in every backward instead. FSDP has already summed the gradients of sharded weights.
        """
        if self.count == 1 or self.mesh is not None:
            return
        gradients: list[Tensor] = []
        for weight in module.parameters():
            if weight.requires_grad:
                if weight.grad is None:  # No token of this rank used the weight.
                    weight.grad = torch.zeros_like(weight)
                gradients.append(weight.grad)
        for bucket in buckets(gradients):
            # The gradients of a small model fit one bucket. A collective for each of them would take longer.
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            summed = flat.split([gradient.numel() for gradient in bucket])
            for gradient, values in zip(bucket, summed, strict=True):
                gradient.copy_(values.view_as(gradient))

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.count > 1:
            dist.barrier()


def as_shared(error: Exception, rank: int) -> Exception:
    """What all ranks raise after an error of one rank: the same error, or RankFailed if it is unexpected.

    An unexpected error can be of any type, and its type may be one that cannot be pickled. Its traceback is
    shown by all ranks, because the rank that fails may have no terminal.
    """
    if isinstance(error, (UsageError, Resumable, RankFailed)):
        return error
    if isinstance(error, OSError):  # `command_line.explain` explains some of them, such as a full disk.
        shared: Exception = error
    else:
        shared = RankFailed(f"rank {rank} failed ({type(error).__name__}: {first_line(error)})")
    shared.add_note("".join(traceback.format_exception(error)))
    return shared


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Divide tensors into lists of at most BUCKET numbers, or of one larger tensor. Keeps their order."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def start_ranks(device: torch.device, layout: str, *, timeout: float = 3600.0) -> Ranks:
    """Join the process group of torchrun. Without torchrun, this process is the only rank.

    `layout` says where the weights that learn are:

        ddp    replicated on all ranks
        fsdp   sharded over all ranks
        hsdp   sharded over the ranks of a node, and replicated over the nodes: a forward then gathers weights
               within a node, and only gradients are summed over the network. On a single node it is fsdp

    A collective raises an error after `timeout` seconds. Raises UsageError if the processes do not find each
    other.
    """
    count = launcher_number("WORLD_SIZE", default=1)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    sharded = layout != "ddp"
    # Offloaded weights are in CPU memory. Their norm is a collective on the CPU, which nccl does not have.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if count > 1:
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:  # A port is in use, or a rank never came.
            raise UsageError(
                f"the {count} ranks (WORLD_SIZE) did not find each other ({first_line(error)}): start all of "
                f"them, with torchrun --nproc-per-node {count} train.py …, or unset WORLD_SIZE"
            ) from None
    elif sharded:  # FSDP needs a process group even for one rank.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank() if count > 1 else 0
    ranks = Ranks(rank, count, device)
    if not sharded:
        return ranks
    return replace(ranks, mesh=_make_mesh(ranks, layout))


def _make_mesh(ranks: Ranks, layout: str) -> DeviceMesh:
    """The mesh over which weights are sharded, with fsdp or hsdp.

    hsdp needs several nodes with the same number of ranks, at least two. Otherwise it is fsdp.
    """
    count, kind = ranks.count, ranks.device.type
    ranks_of_node = launcher_number("LOCAL_WORLD_SIZE", default=count)
    all_equal = set(ranks.gather(ranks_of_node)) == {ranks_of_node}
    if layout == "hsdp" and all_equal and 1 < ranks_of_node < count:
        shape = (count // ranks_of_node, ranks_of_node)  # The ranks of a node have consecutive numbers.
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (count,), mesh_dim_names=("shard",))


def stop_ranks(ranks: Ranks) -> None:
    """Leave the process group. Without the barrier, gloo can abort a process that has done its work."""
    if dist.is_initialized():
        ranks.barrier()
        dist.destroy_process_group()


@contextmanager
def errors_as_rank_lost(ranks: Ranks) -> Iterator[None]:
    """Raise RankLost if a collective in the context fails, because a rank has died or cannot be reached.

    Sharded weights communicate in every forward and backward, so the context spans the whole run.
    """
    try:
        yield
    except RuntimeError as error:
        # NCCL and the store raise a DistError; gloo raises a RuntimeError that begins with its source file.
        failed = isinstance(error, dist.DistError) or "/gloo/" in str(error)
        if not failed or is_out_of_memory(error):
            raise
        raise RankLost(
            f"rank {ranks.rank} of {ranks.count} could not communicate ({first_line(error)}): another rank "
            "has died or hangs; the same command resumes from the last checkpoint"
        ) from None
