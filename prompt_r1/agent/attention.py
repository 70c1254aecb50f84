"""The attention function of our models: packed rows in training, cached sequences in decoding.

It is registered with transformers' `AttentionInterface`, so Hugging Face models run unmodified. Keywords of a
model's forward reach the attention of every layer: `packed=` or `ragged=` selects what it computes.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from prompt_r1.agent.decode_kernels import RaggedBatch

NAME = "prompt_r1"

PackedAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(H, T, D) queries, (Hkv, T, D) keys and values of a packed row, the scale → (H, T, D)."""

# Keywords of a forward that reach every attention function and change nothing here.
IGNORED = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"})


class UnsupportedAttention(Exception):
    """What a model wants of its attention and `attend` cannot compute: "its attention …"."""


def attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hkv, T, D)
    value: Tensor,  # (B, Hkv, T, D)
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    ragged: RaggedBatch | None = None,
    packed: PackedAttention | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention; returns (B, T, H, D). Without `ragged` or `packed`, rows must be right-padded.

    Raises UnsupportedAttention for anything else that the model asks for.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in IGNORED]
    if unknown:
        raise UnsupportedAttention(f"its attention takes {', '.join(sorted(unknown))}")
    if attention_mask is not None:
        raise UnsupportedAttention("its attention takes a mask of its own")
    if dropout:
        raise UnsupportedAttention("its attention has dropout")
    if is_causal is False:
        raise UnsupportedAttention("its attention is not causal")
    if sliding_window is not None:
        raise UnsupportedAttention("its attention has a sliding window")
    if key.shape != value.shape:
        raise UnsupportedAttention("its attention has keys and values of different sizes")
    if ragged is not None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedAttention("its attention does not know its layer's number")
        keys, values = ragged.keys[layer], ragged.values[layer]
        keys.index_copy_(1, ragged.rows, key[0].to(keys.dtype))
        values.index_copy_(1, ragged.rows, value[0].to(values.dtype))
        rows = query[0].transpose(0, 1).to(keys.dtype)  # (T, H, D)
        return ragged.kernel(rows, keys, values, ragged, scaling)[None], None
    if packed is not None:
        # Query and key norms computed in float32 return float32: back to the compute dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return packed(query[0], key[0], value[0], scale).transpose(0, 1)[None], None
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def register() -> None:
    """Register `attn_implementation="prompt_r1"` with transformers. Calling it again has no effect.

    The name is not in transformers' mask interface, so models build no mask for it.
    """
    AttentionInterface.register(NAME, attend)
