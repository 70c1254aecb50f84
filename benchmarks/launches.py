"""What a decode step launches on a GPU, and where it waits for one, traced with meta tensors.

The real engine plays on a model of Qwen3-4B's shape whose tensors have shapes but no data. The trace counts
the operations that launch a kernel, and the copies between host and device. Operations that only return a
view launch nothing. It needs no GPU, and says nothing about how long anything takes.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from benchmarks.virtual import Launches
from prompt_r1.agent import attention, decode_kernels
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.fused_kernels import ROTARY, fuse
from prompt_r1.agent.policy import Policy

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear", "matmul"}
# Operations that return new tensors without a kernel.
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh",
    "_reshape_alias", "resize_", "set_", "is_same_size", "sym_size", "_local_scalar_dense",
}  # fmt: skip


@dataclass
class Traced:
    """Counts of a trace."""

    operations: Counter[str]
    uploads: int = 0  # blocking copies to the device
    downloads: int = 0  # blocking copies from it
    copies: int = 0  # from pinned memory, without waiting

    @property
    def launches(self) -> Launches:
        def number(wanted: Any) -> int:
            return sum(count for name, count in self.operations.items() if wanted(name))

        products = number(lambda name: name in PRODUCTS)
        attending = number(lambda name: "attention" in name)
        return Launches(products, attending, self.operations.total() - products - attending)

    @property
    def synchronisations(self) -> int:
        return self.uploads + self.downloads


class Trace(TorchDispatchMode):
    """Counts what would happen on a device. Downloads from the meta device read zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Traced(Counter())
        self.in_compiled_region = False

    def compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """In place of torch.compile: count the kernels that inductor generates for a function.

        2 for a rotary embedding, of the queries and of the keys, and 1 for the product of a gate. (Counted on
        a CPU by `torch._inductor.metrics.generated_kernel_count`, with `force_pointwise_cat` as on GPUs.)
        """
        kernels = 2 if function.__name__ == ROTARY else 1

        def compiled(*inputs: Tensor) -> Any:
            self.counts.operations["compiled"] += kernels
            self.in_compiled_region = True
            try:
                return function(*inputs)
            finally:
                self.in_compiled_region = False

        return compiled

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        if self.in_compiled_region:
            return operation(*args, **kwargs)
        if name == "rms_norm":  # one kernel on a GPU, several operations elsewhere
            self.counts.operations[name] += 1
            return torch.empty_like(args[0])
        with self:  # in inference mode, composite operations arrive whole
            parts = operation.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor.device.type == "meta" for tensor in tensors]
        if name == "_local_scalar_dense" and on_device[0]:
            self.counts.downloads += 1
            return 0
        if name == "_to_copy" and "device" in kwargs:
            to_device = torch.device(kwargs["device"]).type == "meta"
            if to_device != on_device[0]:
                return self._transfer(to_device, kwargs.get("non_blocking"), tensors[0], kwargs)
        if name == "copy_" and on_device[0] != on_device[1]:
            waits = not (kwargs.get("non_blocking") or args[2:] == (True,))
            self._count_transfer(on_device[0], waits)
            return args[0] if on_device[0] else args[0].zero_()
        if name in ("index", "index_put", "index_put_") and any(on_device):
            hosted = [tensor for tensor in tensors[1:] if tensor.device.type == "cpu" and tensor.ndim]
            self.counts.uploads += len(hosted)
        result = operation(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        computes = any(tensor.device.type == "meta" for tensor in [*tensors, *results])
        if computes and name not in NO_KERNEL and not _is_view(operation):
            self.counts.operations[name] += 1
        return result

    def _count_transfer(self, to_device: bool, waits: bool) -> None:
        if not waits:
            self.counts.copies += 1
        elif to_device:
            self.counts.uploads += 1
        else:
            self.counts.downloads += 1

    def _transfer(self, to_device: bool, non_blocking: bool | None, source: Tensor, kwargs: Any) -> Tensor:
        self._count_transfer(to_device, not non_blocking)
        dtype = kwargs.get("dtype") or source.dtype
        return torch.zeros(source.shape, dtype=dtype, device="meta" if to_device else "cpu")


class HostLists(TorchFunctionMode):
    """Counts `torch.tensor(…, device=…)` and `tensor[list]`: the dispatcher sees no copy of meta tensors."""

    def __init__(self, counts: Traced) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        creates = function in (torch.tensor, torch.as_tensor)
        if creates and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            self.counts.uploads += 1
        indexes = function in (Tensor.__getitem__, Tensor.__setitem__)
        if indexes and isinstance(args[1], list) and args[0].device.type == "meta":
            self.counts.uploads += 1
        return function(*args, **kwargs)


def _is_view(operation: Any) -> bool:
    """Whether an operation returns a view of its argument."""
    returns = operation._schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def fuse_without_data(model: PreTrainedModel, trace: Trace) -> None:
    """Fuse the modules of a model on the meta device: those that agree in a small model of its type."""
    config = copy.deepcopy(model.config)
    config.vocab_size, config.num_hidden_layers, config.hidden_size, config.intermediate_size = 8, 1, 32, 32
    config.layer_types, config.pad_token_id = config.layer_types[:1], None
    small = type(model)(config)
    fuse(small, torch.device("cpu"), torch.float32, compiler=trace.compiler)
    forwards = {
        type(part): vars(part)["forward"].__func__ for part in small.modules() if "forward" in vars(part)
    }
    for module in model.modules():
        if type(module) in forwards:
            module.forward = MethodType(forwards[type(module)], module)


def trace_decode_step(model: PreTrainedModel, *, rows: int, fused: bool = True) -> Traced:
    """Trace one decode step of the engine, with five games of each question, which share its rows.

    The model is on the meta device.

    `fused`: with fused kernels, as on GPUs.
    """
    attention.register()
    policy = Policy(model, compute=torch.bfloat16)
    trace = Trace()
    if fused:
        fuse_without_data(model, trace)
    before_step: list[Traced] = []

    def watch(_: int) -> None:
        """Called for the first game's token in each step: between two calls lies one whole step."""
        counts = trace.counts
        copy = Traced(counts.operations.copy(), counts.uploads, counts.downloads, counts.copies)
        before_step.append(copy)

    async def play() -> None:
        games = []
        for row in range(rows):
            question = row // 5
            prompt = [question, question + 1]
            first = watch if row == 0 else None
            games.append(engine.generate(prompt, max_new=6, seed=str(row), watch=first))
        await asyncio.gather(*games)

    with (
        patch.object(torch, "autocast", lambda *_, **__: nullcontext()),  # has no meta device
        patch.object(Policy, "decode_kernel", lambda self: decode_kernels.flash),
    ):
        engine = Engine(
            policy,
            stop_ids=frozenset(),
            max_tokens=64,
            kv_tokens=64 * rows,
            prefill_tokens=8192,
            record=lambda step: step,
            share_prompts=True,
        )
        with trace, HostLists(trace.counts):
            asyncio.run(play())
    *_, before, after = before_step
    return Traced(
        after.operations - before.operations,
        after.uploads - before.uploads,
        after.downloads - before.downloads,
        after.copies - before.copies,
    )
