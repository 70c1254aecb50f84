"""Attention as its formula says: the oracle of every faster form."""

import torch
from torch import Tensor


def naive_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """One query and one head at a time."""
    out, cached = torch.empty_like(query), key.shape[1] - query.shape[1]
    for head in range(len(query)):
        own = head // (len(query) // len(key))
        for row in range(query.shape[1]):
            visible = slice(max(0, cached + row + 1 - (window or 1000)), cached + row + 1)
            shares = (key[own, visible] @ query[head, row] * scale).softmax(0)
            out[head, row] = shares @ value[own, visible]
    return out
