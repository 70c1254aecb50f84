"""Attention of packed rows and of cached sequences.

It is registered with transformers' `AttentionInterface`, so Hugging Face models run unmodified. Keywords of a
model's forward reach the attention of every layer: `packed=` or `ragged=` selects what it computes.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

NAME = "prompt_r1"
BLOCK = 512  # queries at a time, so that scores never exist for a whole long game


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of a model's attention."""

    layers: int
    heads: int
    kv_heads: int
    dim: int  # of a head
    windows: bool  # some layers have a sliding window

    @property
    def cache_entries(self) -> int:
        """Numbers in the KV cache for each token: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.dim


def attention_shape(config: PretrainedConfig) -> AttentionShape:
    """The sizes of the attention of a model with this config."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    shared = 1 if getattr(text, "multi_query", False) else heads
    return AttentionShape(
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or shared,
        dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        windows=getattr(text, "sliding_window", None) is not None,
    )


@dataclass(frozen=True, eq=False)
class ScoreRules:
    """How a layer's attention differs from plain causal attention."""

    window: int | None = None  # each token sees this many tokens, itself included; None: all before it
    softcap: float | None = None  # scores are cap · tanh(score / cap)
    sinks: Tensor | None = None  # (H,) the score of one more key for each head, whose value is 0

    @property
    def explicit(self) -> bool:
        """Whether the scores themselves must be computed, which no fast kernel returns."""
        return self.softcap is not None or self.sinks is not None

    def applies(self, longest: int) -> bool:
        """Whether anything differs from plain causal attention in sequences of at most this many tokens."""
        return self.explicit or (self.window is not None and self.window < longest)


PLAIN = ScoreRules()
PackedAttention = Callable[[Tensor, Tensor, Tensor, float, ScoreRules], Tensor]
"""(H, T, D) queries, (Hkv, T, D) keys and values of a packed row, the scale, the rules → (H, T, D)."""
CachedAttention = Callable[[int, Tensor, Tensor, Tensor, float, ScoreRules], Tensor]
"""The layer's number; then as above, for new tokens over the KV cache → (T, H, D)."""


class UnsupportedAttention(Exception):
    """What a model wants of its attention and `attend` cannot compute: "its attention …"."""


@dataclass(frozen=True, eq=False)
class Keywords:
    """What the layers of a model, and the caller of its forward, say about attention."""

    scaling: float | None = None
    dropout: float = 0.0
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None  # (H,) sinks
    is_causal: bool | None = None
    ragged: CachedAttention | None = None
    packed: PackedAttention | None = None


KEYWORDS = {field.name for field in fields(Keywords)}
# Keywords of a forward that reach every attention function and change nothing here; so does "output_…".
IGNORED = {"position_ids", "use_cache", "return_dict"}


def attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hkv, T, D)
    value: Tensor,  # (B, Hkv, T, D)
    attention_mask: Tensor | None,
    **keywords: Any,  # those of `Keywords`; any other is refused
) -> tuple[Tensor, None]:
    """Causal attention; returns (B, T, H, D). Without `ragged` or `packed`, rows must be right-padded.

    Raises UnsupportedAttention for anything else that the model asks for.
    """
    unknown = {name for name, given in keywords.items() if given is not None} - KEYWORDS - IGNORED
    unknown = {name for name in unknown if not name.startswith("output_")}
    if unknown:
        raise UnsupportedAttention(f"its attention takes {', '.join(sorted(unknown))}")
    given = Keywords(**{name: keywords[name] for name in KEYWORDS & keywords.keys()})
    if attention_mask is not None:
        raise UnsupportedAttention("its attention takes a mask of its own")
    if given.dropout:
        raise UnsupportedAttention("its attention has dropout")
    if given.is_causal is False:
        raise UnsupportedAttention("its attention is not causal")
    if key.shape != value.shape:
        raise UnsupportedAttention("its keys and values have different sizes (latent attention)")
    rules = ScoreRules(given.sliding_window, given.softcap, given.s_aux)
    scale = query.shape[-1] ** -0.5 if given.scaling is None else given.scaling
    if given.ragged is not None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedAttention("its attention does not know its layer's number")
        return given.ragged(layer, query[0], key[0], value[0], scale, rules)[None], None
    if given.packed is not None:
        # Query and key norms computed in float32 return float32: back to the compute dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        # Contiguous, because some models take a view of it; others copy it anyway.
        return given.packed(query[0], key[0], value[0], scale, rules).transpose(0, 1)[None].contiguous(), None
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


def attend_by_rules(query: Tensor, key: Tensor, value: Tensor, scale: float, rules: ScoreRules) -> Tensor:
    """Causal attention of one sequence under any rules, on any device, differentiable.

    (H, Tq, D) queries, the last Tq of the T tokens, and (Hkv, T, D) keys and values → (H, Tq, D).
    """
    cached = key.shape[1] - query.shape[1]
    out: list[Tensor] = []
    for start in range(0, query.shape[1], BLOCK):
        rows = query[:, start : start + BLOCK]
        first_row = cached + start
        end = first_row + rows.shape[1]
        first_key = 0 if rules.window is None else max(0, first_row + 1 - rules.window)
        distance = (
            torch.arange(first_row, end, device=query.device)[:, None]
            - torch.arange(first_key, end, device=query.device)[None]
        )
        visible = distance >= 0
        if rules.window is not None:
            visible &= distance < rules.window
        keys = slice(first_key, end)
        out.append(_attend_block(rows, key[:, keys], value[:, keys], visible, scale, rules))
    return torch.cat(out, 1)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, rules: ScoreRules
) -> Tensor:
    """(H, Tq, D) queries, (Hkv, Tk, D) keys and values, visible (Tq, Tk) → (H, Tq, D)."""
    groups = len(query) // len(key)
    if not rules.explicit:
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=visible, scale=scale, enable_gqa=groups > 1
        )[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = (query @ key.transpose(1, 2)).float() * scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], -1)
    share = torch.softmax(scores, -1)[..., : key.shape[1]]
    return share.to(value.dtype) @ value
