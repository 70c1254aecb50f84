"""The processes that torchrun starts: their collectives, sharded weights (FSDP2), and signals.

Every collective is called by all ranks or by none. With `--parallel fsdp` each rank learns with a shard of
the weights (`shard`), and plays with a whole copy: after each update `Policy.copy_weights_from` gathers the
shards, weight by weight, into the engine's policy (`Run.refresh`).
"""

import asyncio
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from prompt_r1.errors import FatalEnvError, Interrupted, Resumable, UsageError, first_line, is_out_of_memory
from prompt_r1.programs.launcher import launched

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_CTRL_C = 1.0  # seconds: a terminal sends it to torchrun and to its ranks, and torchrun sends it again


class RankLost(Resumable):
    """A rank is out of reach, so the others cannot even save: the run resumes from its last checkpoint."""


@dataclass(frozen=True)
class Ranks:
    """This process, number `rank` of `count`, and its collectives."""

    rank: int
    count: int
    device: torch.device
    mesh: DeviceMesh | None = None  # over which weights are sharded; None: every rank has all of them

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages."""
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """Every rank's item, in the order of the ranks, on every rank."""
        if self.count == 1:
            return [item]
        items: list[T] = [item] * self.count
        dist.all_gather_object(items, item)
        return items

    def gather_lists(self, items: list[T]) -> list[T]:
        """The items of every rank in one list, in the order of the ranks."""
        return [item for share in self.gather(items) for item in share]

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of a list; `gather_lists` puts the parts together again."""
        begin, end = (rank * len(items) // self.count for rank in (self.rank, self.rank + 1))
        return items[begin:end]

    def run(self, work: Callable[[], T]) -> T:
        """Do this rank's share of some work, and wait for the other ranks.

        An error on one rank is raised on all of them, so that none waits in a collective for a rank that has
        left.
        """
        failure: Exception | None = None
        try:
            result = work()
        except (UsageError, Resumable, FatalEnvError, OSError) as error:
            failure = error
        for failed in filter(None, self.gather(failure)):
            self.barrier()  # a rank that left at once could cut off the others while they receive
            raise failed
        return result

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0; return its result, or raise its error, on every rank."""
        made = self.run(lambda: make() if self.first else None)
        return self.gather(made)[0]  # type: ignore[return-value]

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

    @torch.no_grad()
    def weight_norm(self, module: nn.Module) -> float:
        """The norm of all weights of a module; not finite if any of them is not, or if they overflow it."""
        return full_tensor(nn.utils.get_total_norm(module.parameters())).item()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.count > 1:
            dist.barrier()


def pick_device(name: str) -> torch.device:
    """The device called auto (a GPU if there is one), cuda (this process's GPU), cuda:N or cpu.

    Where a launcher shows each process only its own GPU (CUDA_VISIBLE_DEVICES for each Slurm task), it is
    number 0. Raises UsageError for another name, and where there is no GPU for this process.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not re.fullmatch(r"auto|cuda(:\d+)?", name):
        raise UsageError(f"--device {name}: no such device; choose auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this machine has no usable GPU; choose cpu")
    if ":" in name:
        return torch.device(name)
    # Batches of changing sizes then leave fewer holes between the allocator's segments.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    local_rank, visible = launched("LOCAL_RANK", 0), torch.cuda.device_count()
    if visible > 1 and local_rank >= visible:
        raise UsageError(
            f"process {local_rank} of this machine sees {visible} GPUs: start as many processes as there are "
            "GPUs, or show each process one GPU of its own"
        )
    return torch.device("cuda", 0 if visible == 1 else local_rank)


def start_ranks(device_name: str, parallel: str = "auto", *, timeout: float = 3600.0) -> Ranks:
    """Join the process group of torchrun; without torchrun, this process is the only rank.

    `parallel` is ddp, fsdp, or auto: fsdp on several GPUs. A rank that has waited `timeout` seconds for
    another gives up. Raises UsageError where the processes do not find each other.
    """
    count, device = launched("WORLD_SIZE", 1), pick_device(device_name)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    sharded = parallel == "fsdp" or (parallel == "auto" and on_gpu and count > 1)
    if count > 1 or sharded:
        # gloo beside nccl: the norm of weights that are offloaded to CPU memory is computed there.
        backend, limit = "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timedelta(seconds=timeout)
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if count == 1 else {}
        try:
            dist.init_process_group(backend, timeout=limit, **alone)
        except (RuntimeError, ValueError) as error:  # a port in use, a rank that never comes
            raise UsageError(
                f"the {count} ranks (WORLD_SIZE) did not find each other ({first_line(error)}): start all of "
                f"them, with torchrun --nproc-per-node {count} train.py …, or unset WORLD_SIZE"
            ) from None
    mesh = init_device_mesh(device.type, (count,), mesh_dim_names=("shard",)) if sharded else None
    return Ranks(dist.get_rank() if count > 1 else 0, count, device, mesh)


def stop_ranks(ranks: Ranks) -> None:
    """Leave the process group. Without the barrier, gloo can abort a process whose work was done."""
    if dist.is_initialized():
        ranks.barrier()
        dist.destroy_process_group()


@contextmanager
def lost_ranks_resumable(ranks: Ranks) -> Iterator[None]:
    """Raise RankLost in place of an error of a collective: another rank has died, hangs or is cut off."""
    try:
        yield
    except RuntimeError as error:
        # gloo, NCCL and the store raise plain RuntimeErrors: what they have in common is the place.
        files = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
        in_collective = any(file.is_relative_to(Path(dist.__file__).parent) for file in files)
        if ranks.count == 1 or not in_collective or is_out_of_memory(error):
            raise
        raise RankLost(
            f"the ranks could not communicate ({first_line(error)}): one of them has died or hangs; the same "
            "command resumes from the last checkpoint"
        ) from None


def shard(
    root: nn.Module, blocks: Iterable[nn.Module], *, mesh: DeviceMesh, compute: torch.dtype, offload: bool
) -> None:
    """Shard a module in place over the ranks of `mesh` (FSDP2), on the device of the mesh.

    The weights of a block are gathered for its forward and its backward, and freed afterwards: every forward
    and backward is called by all ranks or by none. Shards have the dtype of the module, gathered weights have
    `compute`, and gradients are summed in float32. With `offload` the shards are in CPU memory, where AdamW
    updates them.
    """
    stored = next(root.parameters()).dtype
    mixed = MixedPrecisionPolicy(None if stored == compute else compute, reduce_dtype=torch.float32)
    pinned = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    # The root comes last and gets the weights outside the blocks: embedding, last norm and head, tied or not.
    for module in (*blocks, root):
        sharded = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,  # the root too, so that no stale weights stay gathered
            mp_policy=mixed,
            offload_policy=pinned if offload else OffloadPolicy(),
        )
        # The loss is a weighted sum over all ranks, so gradients are summed, not averaged; and gloo
        # supports no averages.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks; return any other as it is. Called by every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Interrupt:
    """Handles SIGTERM, SIGUSR1 and the first Ctrl-C inside `with`: the run saves and exits.

    Before training begins it exits at once. Afterwards running games are cancelled, but an update is
    finished; the ranks agree on the step. A second Ctrl-C exits at once without saving.
    """

    def __init__(self) -> None:
        self.stop: Resumable | None = None  # ends the run: by the first signal that was received
        self.received = 0.0  # monotonic seconds, when it was
        self.deferred = False  # set once training has begun and there is something to save
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> "Interrupt":
        # A shell ignores Ctrl-C for what it runs in the background, where it must not end the run.
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def guard(self, work: Coroutine[None, None, T]) -> T:
        """Await the work; a signal cancels it, and Resumable is raised."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        # Thread-safe, to wake up the loop: the signal may come while it sleeps.
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self.stop:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError as error:
            raise self.stop or error from None
        finally:
            self._cancel = lambda: None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.stop and time.monotonic() - self.received > SAME_CTRL_C:
            raise KeyboardInterrupt
        if not self.stop:
            kind = Interrupted if number == signal.SIGINT else Resumable
            self.stop, self.received = kind(f"{signal.Signals(number).name} was received"), time.monotonic()
        if not self.deferred:
            raise type(self.stop)(f"{self.stop} before training began")
        self._cancel()
