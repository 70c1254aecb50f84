"""Attention of packed rows (packing.py) and of sequences in the paged KV cache (kv_cache.py).

`attend` is registered with transformers' `AttentionInterface`, so Hugging Face models run unmodified. A
keyword of a model's forward reaches the attention of every layer: `attend_row=` is the function that computes
a row.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "prompt_r1"

Window = int | None
"""How many tokens each token of a layer sees, itself included; None: all tokens before it."""
RowAttention = Callable[[int, Tensor, Tensor, Tensor, float, Window], Tensor]
"""Layer number, (H, T, D) queries, (Hkv, T, D) keys and values, scale, window → contiguous (T, H, D)."""
Mask = Callable[[int, int, int, torch.dtype, torch.device], Tensor]
"""`causal_mask`, perhaps cached: all layers of a forward share their masks."""


class Row(Protocol):
    """A row of T tokens that a model computes in one forward: packed games, or tokens beside a KV cache."""

    @property
    def tokens(self) -> Tensor: ...  # (T,) int64

    @property
    def positions(self) -> Tensor: ...  # (T,) of each token in its game

    @property
    def attend(self) -> RowAttention: ...  # the attention of one forward


class UnsupportedAttention(Exception):
    """A model asks for an attention that `attend` does not compute. The message begins "its attention …"."""


# On a CPU, SDPA also computes the scores that a mask hides. So masked queries are computed in blocks of this
# many, each with only the keys up to its last query.
BLOCK = 256

# Keywords of a model's forward that reach the attention and do not change it, by how they begin.
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
    rows = [
        attend_in_window(queries, keys, values, scale, sliding_window)
        for queries, keys, values in zip(query, key, value, strict=True)
    ]
    return torch.stack(rows).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register `attn_implementation="prompt_r1"` with transformers. Calling it again has no effect.

    transformers builds no mask for an attention whose name is not in its mask interface, such as this one.
    """
    AttentionInterface.register(NAME, attend)


def causal_mask(count: int, length: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mask (count, length) for the last `count` of `length` tokens: 0 for keys that they see, else -inf."""
    hidden = torch.full((count, length), -torch.inf, dtype=dtype, device=device)
    later = hidden.triu(length - count + 1)
    before_window = hidden.tril(length - count - window)
    return later + before_window


def attend_in_window(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window = None, mask: Mask = causal_mask
) -> Tensor:
    """Causal attention of one sequence, on any device, differentiable.

    The queries (H, Tq, D) are the last Tq of the T tokens of the keys and values (Hkv, T, D). → (H, Tq, D)
    """
    count, length = query.shape[1], key.shape[1]
    window = min(window or length, length)
    needs_mask = count < length or window < length
    if needs_mask and query.device.type == "cpu" and count > BLOCK:
        parts: list[Tensor] = []
        end = length - count
        for queries in query.split(BLOCK, 1):
            end += queries.shape[1]  # the keys up to the last of these queries
            parts.append(attend_in_window(queries, key[:, :end], value[:, :end], scale, window, mask))
        return torch.cat(parts, 1)
    visible: Tensor | None = None
    if needs_mask and window == length and query.is_cuda and query.dtype.itemsize == 2:
        from torch.nn.attention.bias import causal_lower_right  # slow to import

        visible = causal_lower_right(count, length)  # FlashAttention takes no tensor as a mask
    elif needs_mask:
        # SDPA turns a mask of booleans into floats at every call, and keeps them for backward.
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
