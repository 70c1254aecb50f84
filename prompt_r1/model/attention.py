"""Attention of packed rows (packing.py) and of sequences in the paged KV cache (kv_cache.py).

It is registered with transformers' `AttentionInterface`, so Hugging Face models run unmodified. Keywords of a
model's forward reach the attention of every layer: `attend_row=` is the function that computes the row.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "prompt_r1"

Window = int | None
"""The number of tokens that each token of a layer sees, itself included; None: all before it."""
RowAttention = Callable[[int, Tensor, Tensor, Tensor, float, Window], Tensor]
"""Layer number, (H, T, D) queries, (Hkv, T, D) keys and values, scale, window → contiguous (T, H, D)."""
Mask = Callable[[int, int, int, torch.dtype, torch.device], Tensor]
"""Makes a `causal_mask`, or returns the one that another layer has made."""


class Row(Protocol):
    """A row of T tokens that a model computes in one forward: packed games, or tokens beside a KV cache."""

    @property
    def tokens(self) -> Tensor: ...  # (T,) int64

    @property
    def positions(self) -> Tensor: ...  # (T,) of each token in its game

    @property
    def attend(self) -> RowAttention: ...  # the attention of one forward


class UnsupportedAttention(Exception):
    """What a model wants of its attention and `attend` cannot compute: "its attention …"."""


# Queries of one call with a mask on a CPU, where SDPA also computes the keys that the mask hides.
BLOCK = 256

# Beginnings of a forward's keywords that reach every attention function and change nothing here.
IGNORED = ("position_ids", "use_cache", "return_dict", "output_")


def attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hkv, T, D)
    value: Tensor,  # (B, Hkv, T, D)
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Window = None,
    is_causal: bool | None = None,
    attend_row: RowAttention | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention; returns (B, T, H, D). Without `attend_row`, rows must be right-padded.

    Raises UnsupportedAttention for anything else that the model asks for.
    """
    unknown = [name for name in others if others[name] is not None and not name.startswith(IGNORED)]
    if unknown:
        raise UnsupportedAttention(f"its attention takes {', '.join(sorted(unknown))}")
    if attention_mask is not None:
        raise UnsupportedAttention("its attention takes a mask of its own")
    if dropout:
        raise UnsupportedAttention("its attention has dropout")
    if is_causal is False:
        raise UnsupportedAttention("its attention is not causal")
    if key.shape != value.shape:
        raise UnsupportedAttention("its keys and values have different sizes (latent attention)")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attend_row is not None:
        layer = cast(int, module.layer_idx)
        return attend_row(layer, query[0], key[0], value[0], scale, sliding_window)[None], None
    rows = [attend_in_window(*row, scale, sliding_window) for row in zip(query, key, value, strict=True)]
    return torch.stack(rows).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register `attn_implementation="prompt_r1"` with transformers. Calling it again has no effect.

    The name is not in transformers' mask interface, so models build no mask for it.
    """
    AttentionInterface.register(NAME, attend)


def causal_mask(count: int, length: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(count, length): 0 where one of the last `count` of `length` tokens sees a key, else -inf."""
    unseen = torch.full((count, length), -torch.inf, dtype=dtype, device=device)
    return unseen.triu(length - count + 1) + unseen.tril(length - count - window)


def attend_in_window(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window = None, mask: Mask = causal_mask
) -> Tensor:
    """Causal attention of one sequence, on any device, differentiable.

    (H, Tq, D) queries, the last Tq of the T tokens, and (Hkv, T, D) keys and values → (H, Tq, D).
    """
    count, length = query.shape[1], key.shape[1]
    window = min(window or length, length)
    if query.device.type == "cpu" and count > BLOCK and min(count, window) < length:
        ends = range(length - count + BLOCK, length + BLOCK, BLOCK)
        blocks = zip(query.split(BLOCK, 1), ends, strict=True)
        parts = [attend_in_window(q, key[:, :end], value[:, :end], scale, window, mask) for q, end in blocks]
        return torch.cat(parts, 1)
    visible: Tensor | None = None
    if query.is_cuda and query.dtype.itemsize == 2 and count < window == length:
        from torch.nn.attention.bias import causal_lower_right  # slow to import

        visible = causal_lower_right(count, length)  # FlashAttention takes no mask
    elif min(count, window) < length:
        # Floats, because of booleans SDPA would make new ones at every call, and keep them for backward.
        visible = mask(count, length, window, query.dtype, query.device)
    return F.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=len(query) != len(key),
    )[0]
