"""The one attention function: training on whole rows, and cached decoding of ragged segments.

It is registered with transformers' `AttentionInterface`, so Hugging Face models run unmodified. Which of the
two jobs it does is told by a keyword of the model's forward (`ragged=`), which transformers passes on to
every layer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "prompt_r1"


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence in a packed forward: where they stand, and what its cache then holds."""

    slot: int
    start: int  # first column of the packed row
    count: int  # new tokens
    length: int  # tokens of this sequence in the cache after these, count included


@dataclass(frozen=True)
class Ragged:
    """A packed batch (1, T) of segments, and the cache that they read and extend."""

    keys: list[Tensor]  # one (S, Hkv, N, D) a layer: slots, heads, capacity, head dim
    values: list[Tensor]
    segments: list[Segment]
    slots: Tensor  # (T,) the slot of each new token
    positions: Tensor  # (T,) its position in its sequence


def attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hkv, T, D)
    value: Tensor,  # (B, Hkv, T, D)
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    ragged: Ragged | None = None,
    sliding_window: int | None = None,
    **_: object,  # transformers hands every layer more keywords than any one function needs
) -> tuple[Tensor, None]:
    """Causal attention, (B, T, H, D). Without `ragged` rows are right-padded: no token sees padding."""
    assert attention_mask is None, "rows are causal and right-padded: there is no mask"
    assert not dropout, "dropout would make the trained policy another one than the sampled"
    assert sliding_window is None, f"sliding-window attention ({sliding_window}) is not supported"
    if ragged is not None:
        return _attend_ragged(ragged, module.layer_idx, query, key, value, scaling), None
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def _attend_ragged(
    ragged: Ragged, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """Cache the new keys and values; each segment then attends to its own slot. (1, T, H, D)"""
    keys, values = ragged.keys[layer], ragged.values[layer]
    keys[ragged.slots, :, ragged.positions] = key[0].transpose(0, 1).to(keys.dtype)
    values[ragged.slots, :, ragged.positions] = value[0].transpose(0, 1).to(values.dtype)
    query = query.to(keys.dtype)
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    out = query.new_empty(1, query.shape[2], heads, dim)
    for segment in ragged.segments:
        columns = slice(segment.start, segment.start + segment.count)
        k = keys[segment.slot : segment.slot + 1, :, : segment.length]
        v = values[segment.slot : segment.slot + 1, :, : segment.length]
        if segment.count == 1:
            # The heads that share a key are laid out as rows: far faster on a CPU than repeating the keys.
            q = query[:, :, segment.start].view(1, kv_heads, heads // kv_heads, dim)
            part = F.scaled_dot_product_attention(q, k, v, scale=scaling)
            out[:, segment.start] = part.reshape(1, heads, dim)
            continue
        # Row i of the chunk sees everything up to its own position: causal, aligned at the bottom right.
        mask = torch.ones(segment.count, segment.length, dtype=torch.bool, device=query.device)
        mask = mask.tril(segment.length - segment.count)
        part = F.scaled_dot_product_attention(
            query[:, :, columns], k, v, attn_mask=mask, scale=scaling, enable_gqa=heads != kv_heads
        )
        out[:, columns] = part.transpose(1, 2)
    return out


def register() -> None:
    """Make `attn_implementation="prompt_r1"` known to transformers (idempotent).

    It has no entry in transformers' mask interface, so that models build no mask for it.
    """
    AttentionInterface.register(NAME, attend)
