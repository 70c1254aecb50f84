"""FlashAttention in plain torch, for tests of what calls it."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prompt_r1.agent.decode_kernels import CacheOffsets, _attend_to_both


def flash_in_plain_torch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    offsets: CacheOffsets,
    *,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention's contract: sequence n has queries [queries[n], queries[n + 1]) and `lengths[n]` keys
    from starts[n] on; causal means aligned at the bottom right. A window of n: n more keys to the left.

    Returns the output and its logsumexp (H, T): for no keys, zeros and infinity.
    """
    out = torch.empty_like(query)
    logsumexp = query.new_empty(query.shape[1], len(query))
    for number, length in enumerate(offsets.lengths.tolist()):
        columns = slice(offsets.queries[number], offsets.queries[number + 1])
        rows = slice(offsets.starts[number], offsets.starts[number] + length)
        count = columns.stop - columns.start
        assert count <= offsets.longest_query and length <= offsets.longest_key
        visible = torch.ones(count, length, dtype=torch.bool)
        if not length:
            out[columns], logsumexp[:, columns] = 0, torch.inf
            continue
        q, k, v = (part.transpose(0, 1) for part in (query[columns], keys[rows], values[rows]))
        mask = visible.tril(length - count) if causal else visible
        mask = mask if window is None else mask.triu(length - count - window)
        part = F.scaled_dot_product_attention(
            q[None], k[None], v[None], scale=scale, enable_gqa=True, attn_mask=mask
        )
        out[columns] = part[0].transpose(0, 1)
        scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * (scale or q.shape[-1] ** -0.5)
        logsumexp[:, columns] = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    return out, logsumexp


def kernel_in_plain_torch(query, keys, values, batch, scale, rules):
    """A kernel that reads the batch from its offsets only, as a recorded one must."""

    def attend(offsets: CacheOffsets) -> tuple[Tensor, Tensor]:
        rows = query, keys.transpose(0, 1), values.transpose(0, 1)
        return flash_in_plain_torch(*rows, offsets, causal=offsets.causal, scale=scale)

    return _attend_to_both(attend, batch, rules)


def package_in_plain_torch(
    *args, causal: bool, seqused_k: Tensor, window_size_left: int = -1, window_size_right: int = -1
) -> tuple[Tensor, Tensor, None, None]:
    """Replaces the function of the flash-attn package."""
    query, keys, values, queries, starts, longest_query, longest_key, dropout, scale = args
    assert dropout == 0 and scale is not None, "the package has no default for the scale"
    offsets = CacheOffsets(queries, starts, seqused_k, longest_query, longest_key)
    window = None if window_size_left == -1 else window_size_left
    assert window_size_right == (-1 if window is None else 0)
    both = flash_in_plain_torch(query, keys, values, offsets, causal=causal, scale=scale, window=window)
    return *both, None, None


@pytest.fixture
def package(monkeypatch) -> None:
    """Installs the package."""
    package = ModuleType("flash_attn.flash_attn_interface")
    package._flash_attn_varlen_forward = package_in_plain_torch
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
