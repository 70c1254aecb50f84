"""Attention of packed rows (packing.py) and of sequences in the KV cache (paged_attention.py).

`model_attention` is registered with transformers' `AttentionInterface`, so Hugging Face models run
unmodified. transformers passes unknown keywords of a model's forward on to the attention of every layer. We
pass `row_attention=`, the function that computes the attention of a whole row.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "prompt_r1"

Window = int | None
"""How many tokens each token sees in a layer, itself included; None: itself and all tokens before it."""
RowAttention = Callable[[int, Tensor, Tensor, Tensor, float, Window], Tensor]
"""Layer number, queries (H, T, D), keys and values (Hkv, T, D), scale, window → contiguous (T, H, D)."""
Mask = Callable[[int, int, int, torch.dtype, torch.device], Tensor]
"""`causal_mask`, or a cached form of it, because all layers of a forward share their masks."""


class Row(Protocol):
    """A row of T tokens that a model computes in one forward: packed games, or tokens beside a KV cache."""

    @property
    def tokens(self) -> Tensor: ...  # (T,) int64

    @property
    def positions(self) -> Tensor: ...  # (T,) the position of each token in its game

    def row_attention(self) -> RowAttention: ...  # The layers of one forward share it.


# On a CPU, SDPA also computes the scores that a mask hides. So masked queries are computed in blocks of 256,
# each with only the keys up to its last query.
BLOCK = 256

# Keywords that begin with these words also reach the attention. They do not change its result.
IGNORED = ("position_ids", "use_cache", "return_dict", "output_")


def model_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, Hkv, T, D)
    value: Tensor,  # (1, Hkv, T, D)
    attention_mask: Tensor | None,
    *,
    row_attention: RowAttention,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Window = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention (1, T, H, D) of a row of T tokens in place of the model's own function.

    Raises NotImplementedError if the model needs another attention.
    """
    unknown = [name for name in others if others[name] is not None and not name.startswith(IGNORED)]
    if unknown:
        raise NotImplementedError(f"its attention takes {', '.join(sorted(unknown))}")
    if attention_mask is not None:
        raise NotImplementedError("its attention takes a mask of its own")
    if dropout:
        raise NotImplementedError("its attention has dropout")
    if is_causal is False:
        raise NotImplementedError("its attention is not causal")
    if key.shape != value.shape:
        raise NotImplementedError("its keys and values have different sizes (latent attention)")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cast(int, module.layer_idx)
    return row_attention(layer, query[0], key[0], value[0], scale, sliding_window)[None], None


def register() -> None:
    """Register `attn_implementation="prompt_r1"` with transformers. Calling it again has no effect.

    transformers builds masks only for attentions in its mask interface, so it builds none for this one.
    """
    AttentionInterface.register(NAME, model_attention)


def causal_mask(count: int, length: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mask (count, length) for the last `count` of `length` tokens: 0 where they see a key, else -inf.

    Row i of the mask is token length - count + i. It sees the `window` tokens that end with itself.
    """
    all_masked = torch.full((count, length), -torch.inf, dtype=dtype, device=device)
    later = all_masked.triu(length - count + 1)  # the keys after the row's token
    before_window = all_masked.tril(length - count - window)  # the keys before its window
    return later + before_window


def attend_in_window(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window, mask: Mask
) -> Tensor:
    """Compute the causal attention (H, Tq, D) of one sequence, on any device, with gradients.

    All T tokens have keys and values (Hkv, T, D). The last Tq tokens have queries (H, Tq, D).
    """
    count, length = query.shape[1], key.shape[1]
    window = min(window or length, length)
    needs_mask = count < length or window < length
    # Each block of queries sees only the keys up to its last query. A block does not recurse again.
    if needs_mask and query.device.type == "cpu" and count > BLOCK:
        parts: list[Tensor] = []
        end = length - count
        for queries in query.split(BLOCK, 1):
            end += queries.shape[1]  # the number of keys up to the last of these queries
            parts.append(attend_in_window(queries, key[:, :end], value[:, :end], scale, window, mask))
        return torch.cat(parts, 1)
    visible: Tensor | None
    if not needs_mask:
        visible = None
    elif window == length and query.is_cuda and query.dtype.itemsize == 2:
        from torch.nn.attention.bias import causal_lower_right  # This import is slow.

        visible = causal_lower_right(count, length)  # FlashAttention does not take a tensor as a mask.
    else:
        # SDPA would convert a mask of booleans to floats at every call, and keep it for backward.
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
