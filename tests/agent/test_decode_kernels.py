"""Decode kernels against plain attention. The GPU kernels are replaced by what their arguments ask for."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prompt_r1.agent.attention import AttentionShape
from prompt_r1.agent.attention_choice import (
    MIXED,
    SHARED,
    SHARED_SINGLE,
    SINGLE,
    Place,
    can_share_rows,
    choose_attention,
    why_not_decode,
)
from prompt_r1.agent.decode_kernels import CacheOffsets, flash, flash_package, one_by_one, ragged_batch
from tests.agent.conftest import flash_in_plain_torch, package_in_plain_torch
from tests.support.games import CPU


class FlashInPlainTorch(TorchDispatchMode):
    """Replaces torch's FlashAttention operator, so that it runs on any device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is not torch.ops.aten._flash_attention_forward.default:
            return operation(*args, **(kwargs or {}))
        query, keys, values, queries, starts, longest_query, longest_key, dropout, causal, _ = args
        assert dropout == 0
        offsets = CacheOffsets(queries, starts, kwargs["seqused_k"], longest_query, longest_key)
        both = flash_in_plain_torch(
            query,
            keys,
            values,
            offsets,
            causal=causal,
            scale=kwargs.get("scale"),
            window=kwargs.get("window_size_left"),
        )
        return *both, *(torch.empty(0) for _ in range(3))


CASES = {
    "mixed": (MIXED, None),
    "mixed with a window": (MIXED, 5),
    "single": (SINGLE, None),
    "single with a window": (SINGLE, 5),
    "shared": (SHARED, None),
    "shared single": (SHARED_SINGLE, None),
}


@pytest.mark.parametrize(("chunks", "window"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("kernel", [flash, flash_package])
def test_the_gpu_kernels_are_called_for_the_attention_that_the_cpu_computes(kernel, chunks, window, package):
    torch.manual_seed(0)
    query = torch.randn(chunks[-1].column + 1, 4, 16)
    keys, values = torch.randn(2, 2, 512, 16).unbind(0)
    batch = ragged_batch(chunks, kernel, CPU)
    with FlashInPlainTorch():
        found = kernel(query, keys, values, batch, 0.4, window)
    torch.testing.assert_close(found, one_by_one(query, keys, values, batch, 0.4, window))


@pytest.mark.parametrize("chunks", [MIXED, SHARED, SHARED_SINGLE], ids=["mixed", "shared", "shared single"])
def test_a_new_token_attends_to_its_own_sequence_up_to_itself(chunks):
    """The oracle computes token by token: softmax over the keys of the visible rows."""
    torch.manual_seed(0)
    query = torch.randn(chunks[-1].column + 1, 4, 16, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 512, 16, dtype=torch.float64).unbind(0)
    found = one_by_one(query, keys, values, ragged_batch(chunks, one_by_one, CPU), 0.4)
    for chunk in chunks:
        own = chunk.length - chunk.shared
        rows = [chunk.shared_start + row for row in range(chunk.shared)]
        rows += [chunk.start + row for row in range(own)]
        for number in range(chunk.count):
            visible = rows[: chunk.length - chunk.count + number + 1]
            for head in range(4):
                weights = (keys[head // 2, visible] @ query[chunk.column + number, head] * 0.4).softmax(0)
                expected = weights @ values[head // 2, visible]
                torch.testing.assert_close(found[chunk.column + number, head], expected)


def test_rows_are_shared_only_with_a_gpu_kernel_that_joins_them_rightly(package, monkeypatch):
    """A kernel without the right logsumexp still plays, but copies the prompt for each game."""
    place = Place(AttentionShape(2, 4, 2, 16, windows=True), CPU, torch.float32)
    assert not choose_attention(place).shares_rows
    assert can_share_rows(flash_package, place)
    interface = sys.modules["flash_attn.flash_attn_interface"]

    def without_logsumexp(*args, **kwargs):
        out, logsumexp, *rest = package_in_plain_torch(*args, **kwargs)
        return out, torch.zeros_like(logsumexp), *rest

    monkeypatch.setattr(interface, "_flash_attn_varlen_forward", without_logsumexp)
    assert not why_not_decode(flash_package, place)
    assert not can_share_rows(flash_package, place)


@pytest.mark.parametrize(("longest_query", "causal"), [(1, False), (2, True), (300, True)])
def test_only_a_batch_of_single_tokens_is_not_causal_for_flash_attention(longest_query, causal):
    """The flag would disable its split over long keys; a single token sees the whole sequence anyway."""
    nothing = torch.zeros(0)
    assert CacheOffsets(nothing, nothing, nothing, longest_query, longest_key=300).causal == causal
