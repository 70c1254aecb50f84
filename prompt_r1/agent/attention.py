"""The attention function of our models: packed rows in training, cached sequences in decoding.

It is registered with transformers' `AttentionInterface`, so Hugging Face models run unmodified. Keywords of a
model's forward reach the attention of every layer: `packed=` or `ragged=` selects what it computes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from prompt_r1.agent.decode_kernels import RaggedBatch
from prompt_r1.agent.scores import ScoreRules, attend_by_rules

NAME = "prompt_r1"

PackedAttention = Callable[[Tensor, Tensor, Tensor, float, ScoreRules], Tensor]
"""(H, T, D) queries, (Hkv, T, D) keys and values of a packed row, the scale, the rules → (H, T, D)."""

# Keywords of a forward that reach every attention function and change nothing here; so does "output_…".
IGNORED = frozenset({"position_ids", "use_cache", "return_dict"})


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # (H,) sinks
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention; returns (B, T, H, D). Without `ragged` or `packed`, rows must be right-padded.

    Raises UnsupportedAttention for anything else that the model asks for.
    """
    unknown = {name for name, given in others.items() if given is not None} - IGNORED
    unknown = {name for name in unknown if not name.startswith("output_")}
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
    rules = ScoreRules(sliding_window, softcap, s_aux)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if ragged is not None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedAttention("its attention does not know its layer's number")
        if layer >= len(ragged.keys) or ragged.keys[layer][:, 0].shape != key[0, :, 0].shape:
            raise UnsupportedAttention("its attention has other sizes than its config says")
        keys, values = ragged.keys[layer], ragged.values[layer]
        keys.index_copy_(1, ragged.rows, key[0].to(keys.dtype))
        values.index_copy_(1, ragged.rows, value[0].to(values.dtype))
        rows = query[0].transpose(0, 1).to(keys.dtype)  # (T, H, D)
        return ragged.kernel(rows, keys, values, ragged, scale, rules)[None], None
    if packed is not None:
        # Query and key norms computed in float32 return float32: back to the compute dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        # Contiguous, because some models take a view of it; others copy it anyway.
        return packed(query[0], key[0], value[0], scale, rules).transpose(0, 1)[None].contiguous(), None
    if rules.applies(query.shape[2]):
        rows_of_games = [attend_by_rules(*row, scale, rules) for row in zip(query, key, value, strict=True)]
        return torch.stack(rows_of_games).transpose(1, 2), None
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2), None


def register() -> None:
    """Register `attn_implementation="prompt_r1"` with transformers. Calling it again has no effect.

    The name is not in transformers' mask interface, so models build no mask for it.
    """
    AttentionInterface.register(NAME, attend)
