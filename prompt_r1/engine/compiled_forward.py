"""The forward over the KV cache, compiled by torch.compile into one graph for all batches.

A decode step of Qwen3-4B then launches about 920 kernels instead of 2,254. Both numbers are calculated: the
speed on GPUs was not measured, and the results were compared with the eager forward's on CPUs.

Batch and cache are behind one operator, `attend_in_batch`, that the compiler does not look into. If it saw
the batch, it would compile again in each step, because each step has a new batch. If it saw the cache, it
would copy the whole cache, because each layer writes to it. The operator gets a layer's queries, keys and
values; it finds the batch in `_running`.

CUDA graphs (cuda_graphs.py) capture the kernels of the compiled forward as they capture others.
"""

import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from prompt_r1.engine.paged_attention import PagedBatch
from prompt_r1.errors import first_line
from prompt_r1.model.attention import Window
from prompt_r1.model.policy import Policy

# Arguments of torch.compile: the compiler for GPUs, and its options. Tests give another compiler.
INDUCTOR: Mapping[str, Any] = {
    "backend": "inductor",
    # A fused kernel rounds to 16 bits after each operation, as separate kernels do.
    "options": {"emulate_precision_casts": True},
    # The engines of a process share the code of their model's forward. By default, torch stops after it has
    # compiled it 8 times.
    "recompile_limit": 64,
}

# The batch whose forward runs, or is captured.
_running: ContextVar[PagedBatch] = ContextVar("running batch")


# The operator also writes to the cache. The compiler need not know, because nothing else in its graph reads
# the cache.
@torch.library.custom_op("prompt_r1::attend_in_batch", mutates_args=())
def attend_in_batch(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int
) -> Tensor:
    """`PagedBatch.attend` of the batch that runs. A window of 0 stands for None."""
    return _running.get().attend(layer, query, key, value, scale, window or None)


@attend_in_batch.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int) -> Tensor:
    """An empty tensor with the shape and dtype of the result, from which the compiler plans."""
    heads, tokens, dim = query.shape
    return value.new_empty(tokens, heads, dim)


def _attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window) -> Tensor:
    """The operator as a `RowAttention`. It is the same function for all batches, so nothing is recompiled."""
    return attend_in_batch(query, key, value, layer, scale, window or 0)


class CompiledForward:
    """Computes the hidden states of batches as `Policy.hidden_states` does, with a compiled model.

    It compiles twice: for the first batch of several tokens, and for the first batch of one token. If that
    fails, because Triton or a C compiler is missing or the model cannot be compiled, it warns once, and uses
    the model as it is.
    """

    def __init__(self, policy: Policy, *, compiler: Mapping[str, Any] = INDUCTOR) -> None:
        self._policy = policy
        self._works = True
        self._model = torch.compile(policy.model.base_model, dynamic=True, fullgraph=True, **compiler)

    def __call__(self, batch: PagedBatch) -> Tensor:
        """The last hidden states (T, hidden) of a batch of T tokens."""
        if not self._works:
            return self._policy.hidden_states(batch)
        before = _running.set(batch)
        try:
            return self._policy.run(self._model, batch, _attend)
        except torch.OutOfMemoryError:  # The engine tries a smaller batch.
            raise
        except Exception as error:  # A compiler may fail in any way.
            reason = first_line(error)
        finally:
            _running.reset(before)
        self._works = False
        warnings.warn(
            f"torch.compile does not work here ({reason}): the model plays without, which is slower",
            stacklevel=2,
        )
        return self._policy.hidden_states(batch)
