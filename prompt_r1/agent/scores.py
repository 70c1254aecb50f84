"""Attention with windows, soft caps or sinks: what some layers change in the scores of causal attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512  # queries at a time, so that scores never exist for a whole long game


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
