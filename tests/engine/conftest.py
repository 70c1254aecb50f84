"""torch's variable-length FlashAttention in plain torch: its kernels need a GPU."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def varlen_attn(
    query: Tensor,  # (T, H, D)
    key: Tensor,  # (pages, S, Hkv, D)
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """The contract of `torch.nn.attention.varlen.varlen_attn`: queries are the last of a sequence's keys."""
    assert enable_gqa and num_splits == 1
    assert len(starts_k) == len(starts_q), "the kernel refuses one without the other"
    left, right = window_size
    out = torch.empty_like(query)
    for number, (start, end) in enumerate(pairwise(starts_q.tolist())):
        count, length = end - start, int(seqused_k[number])
        keys, values = (rows[block_table[number]].flatten(0, 1)[:length] for rows in (key, value))
        assert count <= longest_q and length <= longest_k
        visible = torch.ones(count, length, dtype=torch.bool)
        if right == 0:
            visible = visible.tril(length - count)
        if left >= 0:
            visible = visible.triu(length - count - left)
        q, k, v = (part.transpose(0, 1)[None] for part in (query[start:end], keys, values))
        part = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, attn_mask=visible)
        out[start:end] = part[0].transpose(0, 1)
    return out


@pytest.fixture
def varlen(monkeypatch) -> None:
    """Installs it in the place of torch's."""
    kernel = ModuleType("torch.nn.attention.varlen")
    kernel.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
