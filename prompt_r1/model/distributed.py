"""The ranks of a run (the processes that torchrun starts): collectives, sharded weights (FSDP2) and signals.

Every collective is called by all ranks or by none. With `--parallel fsdp` each rank learns with a shard of
the weights (`shard`), and plays with a whole copy. After each update `Policy.copy_weights_from` gathers the
shards into this copy, one weight at a time.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from prompt_r1.errors import (
    FatalEnvError,
    Interrupted,
    Resumable,
    SignalBeforeTraining,
    UsageError,
    first_line,
    is_out_of_memory,
)
from prompt_r1.programs.launcher import check_device, launcher_number

T = TypeVar("T")

# Slurm announces a time limit by SIGTERM or SIGUSR1, submitit by SIGUSR2. A terminal that closes sends
# SIGHUP.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
# A terminal sends Ctrl-C to torchrun and to its ranks, and torchrun sends it to the ranks again. Within this
# many seconds both count as one.
SAME_CTRL_C = 1.0


class RankLost(Resumable):
    """A rank cannot be reached, so the others cannot save: the run resumes from its last checkpoint."""


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

    def on_every_rank(self, work: Callable[[], T]) -> T:
        """Do this rank's share of some work, then wait for the other ranks.

        If the work fails on one rank, its error is raised on all of them. Otherwise the others would wait in
        their next collective for a rank that has left.
        """
        failure: Exception | None = None
        try:
            result = work()
        except (UsageError, Resumable, FatalEnvError, OSError) as error:
            failure = error
        failures = [error for error in self.gather(failure) if error is not None]
        if failures:
            # A rank that leaves at once can break the connection while others still receive the error.
            self.barrier()
            raise failures[0]
        return result

    def on_first_rank(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, and return its result or raise its error on every rank."""
        made = self.on_every_rank(lambda: make() if self.is_first else None)
        return self.gather(made)[0]  # type: ignore[return-value]

    def sum_gradients(self, module: nn.Module) -> None:
        """Sum the gradients over the ranks, after the last micro-batch.

        The loss of a step is the sum of the ranks' losses, so its gradient is the sum of their gradients. DDP
        would sum in every backward instead. FSDP has already summed the gradients of sharded weights.
        """
        if self.count == 1 or self.mesh is not None:
            return
        for weight in module.parameters():
            if weight.requires_grad:
                if weight.grad is None:  # No token of this rank used the weight.
                    weight.grad = torch.zeros_like(weight)
                dist.all_reduce(weight.grad)

    @torch.no_grad()
    def weight_norm(self, module: nn.Module) -> float:
        """Return the norm of all weights of a module. It is not finite if any weight is not."""
        return full_tensor(nn.utils.get_total_norm(module.parameters())).item()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.count > 1:
            dist.barrier()


def pick_device(name: str) -> torch.device:
    """Return the device that --device names.

    The names are auto (a GPU if there is one), cuda (the GPU of this process), cuda:N and cpu. The GPU of a
    process has the number of the process's local rank. If the launcher shows each process only one GPU, as
    Slurm does by CUDA_VISIBLE_DEVICES, this GPU has number 0. Raises UsageError for any other name, and if
    there is no GPU for this process.
    """
    check_device(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this machine has no usable GPU; choose cpu")
    if ":" in name:
        count = torch.cuda.device_count()
        if int(name.partition(":")[2]) >= count:
            raise UsageError(
                f"--device {name}: there is no such GPU: this machine has {count}, from cuda:0 on"
            )
        return torch.device(name)
    # Batches vary in size: expandable segments fragment less of the allocator's memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    local_rank = launcher_number("LOCAL_RANK", default=0)
    visible = torch.cuda.device_count()
    if visible == 1:
        return torch.device("cuda", 0)
    if local_rank >= visible:
        raise UsageError(
            f"process {local_rank} of this machine sees {visible} GPUs: start as many processes as there are "
            "GPUs, or show each process one GPU of its own"
        )
    return torch.device("cuda", local_rank)


def start_ranks(device_name: str, parallel: str = "auto", *, timeout: float = 3600.0) -> Ranks:
    """Join the process group of torchrun. Without torchrun, this process is the only rank.

    `parallel` is one of these:

        ddp    weights are replicated on all ranks
        fsdp   sharded over all ranks
        hsdp   sharded over the ranks of a node, and replicated over the nodes: a forward then gathers weights
               within a node, and only gradients are summed over the network
        auto   hsdp on GPUs, ddp on CPUs. On a single node, hsdp is fsdp

    A collective raises an error after `timeout` seconds. Raises UsageError if the processes do not find each
    other.
    """
    device = pick_device(device_name)
    count = launcher_number("WORLD_SIZE", default=1)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    if parallel == "auto":
        parallel = "hsdp" if on_gpu else "ddp"
    sharded = parallel != "ddp"
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
    if not sharded:
        return Ranks(rank, count, device)
    # Ranks of a node have consecutive numbers. Weights are sharded over all ranks if nodes have unequally
    # many of them, or only one.
    local_counts = Ranks(rank, count, device).gather(launcher_number("LOCAL_WORLD_SIZE", default=count))
    of_node = local_counts[0]
    is_regular = set(local_counts) == {of_node} and count % of_node == 0
    if parallel == "hsdp" and is_regular and 1 < of_node < count:
        shape, names = (count // of_node, of_node), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    else:
        mesh = init_device_mesh(device.type, (count,), mesh_dim_names=("shard",))
    return Ranks(rank, count, device, mesh)


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


def shard(
    root: nn.Module,
    layers: Iterable[nn.Module],
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    offload: bool,
) -> None:
    """Shard a module in place over the ranks of `mesh` (FSDP2), on the device of the mesh.

    The weights of a layer are gathered for its forward and its backward, and freed afterwards. Every forward
    and backward is therefore called by all ranks or by none. Shards have the dtype of the module, gathered
    weights have `compute_dtype`, and gradients are summed in float32. With `offload` the shards are in CPU
    memory, where AdamW updates them.
    """
    stored = next(root.parameters()).dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if stored == compute_dtype else compute_dtype, reduce_dtype=torch.float32
    )
    offload_policy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    # The root comes last. It gets the weights outside the layers: embedding, last norm, and head.
    for module in (*layers, root):
        sharded = fully_shard(
            module,
            mesh=mesh,
            # Otherwise the root keeps its gathered weights after a forward. After the next update, its
            # forward would use the old weights.
            reshard_after_forward=True,
            mp_policy=precision,
            offload_policy=offload_policy,
        )
        # The loss is a weighted sum over all ranks, so gradients are summed, not averaged. Gloo cannot
        # average anyway.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks; return any other tensor unchanged. Called by every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Interrupt:
    """Inside `with`, the first signal that comes (one of SIGNALS) stops the run in an orderly way.

    Before training begins, the signal ends the run at once. Afterwards it cancels the games that are running,
    but an update is finished. The ranks agree on the step that they save, and exit. A second Ctrl-C ends the
    run at once, without saving.
    """

    def __init__(self) -> None:
        self.stop: Resumable | None = None  # The error that ends the run; None: no signal has been received.
        self.received_at = 0.0  # monotonic seconds of the first signal
        self.training_began = False  # Set by the run. From then on there is something to save.
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> "Interrupt":
        # A signal that is ignored stays ignored: SIGHUP under nohup, Ctrl-C of a job in a shell's background.
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def guard(self, work: Coroutine[None, None, T]) -> T:
        """Await the work. A signal cancels it, and then Resumable is raised."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        # The signal may come while the loop sleeps; only the thread-safe call wakes it up.
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self.stop:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self.stop:
                raise self.stop from None
            raise
        finally:
            self._cancel = lambda: None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stop and number == signal.SIGINT and now - self.received_at > SAME_CTRL_C:
            raise KeyboardInterrupt
        reason = f"{signal.Signals(number).name} was received"
        if not self.training_began:
            exit_code = 130 if number == signal.SIGINT else 75
            raise SignalBeforeTraining(f"{reason} before training began", exit_code=exit_code)
        if not self.stop:
            self.stop = Interrupted(reason) if number == signal.SIGINT else Resumable(reason)
            self.received_at = now
        self._cancel()
