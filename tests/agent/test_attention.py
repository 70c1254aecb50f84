"""What a GPU's kernels are called with, computed by hand from the arguments, against the plain attention."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prompt_r1.agent.attention import Chunk, Ragged, choose_kernel, flash, flash_package, one_by_one

CPU = torch.device("cpu")
MIXED = [Chunk(0, 1, 60, 20), Chunk(1, 9, 0, 30), Chunk(10, 7, 81, 7), Chunk(17, 1, 40, 1)]
SINGLE = [Chunk(0, 1, 60, 20), Chunk(1, 1, 0, 30), Chunk(2, 1, 40, 1)]


def by_hand(
    query: Tensor, keys: Tensor, values: Tensor, queries: Tensor, starts: Tensor, longest_query: int,
    longest_key: int, causal: bool, scale: float | None, lengths: Tensor,
) -> Tensor:  # fmt: skip
    """FlashAttention's contract in plain words: sequence n has the queries [queries[n], queries[n + 1]) and
    `lengths[n]` keys from starts[n] on; causal means aligned at the bottom right.
    """
    out = torch.empty_like(query)
    for number, length in enumerate(lengths.tolist()):
        columns = slice(queries[number], queries[number + 1])
        rows = slice(starts[number], starts[number] + length)
        count = columns.stop - columns.start
        assert count <= longest_query and length <= longest_key
        visible = torch.ones(count, length, dtype=torch.bool)
        q, k, v = (part.transpose(0, 1) for part in (query[columns], keys[rows], values[rows]))
        part = F.scaled_dot_product_attention(
            q[None], k[None], v[None], scale=scale, enable_gqa=True,
            attn_mask=visible.tril(length - count) if causal else visible,
        )  # fmt: skip
        out[columns] = part[0].transpose(0, 1)
    return out


class TorchsFlashByHand(TorchDispatchMode):
    """Computes torch's own FlashAttention by hand, on any device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is not torch.ops.aten._flash_attention_forward.default:
            return operation(*args, **(kwargs or {}))
        *rows, dropout, causal, _ = args
        assert dropout == 0
        out = by_hand(*rows, causal, kwargs.get("scale"), kwargs["seqused_k"])
        return out, *(torch.empty(0) for _ in range(4))


def package_by_hand(*args, causal: bool, seqused_k: Tensor) -> tuple[Tensor, None]:
    *rows, dropout, scale = args
    assert dropout == 0 and scale is not None, "the package has no default for the scale"
    return by_hand(*rows, causal, scale, seqused_k), None


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("chunks", [MIXED, SINGLE], ids=["mixed", "single"])
@pytest.mark.parametrize("kernel", [flash, flash_package])
def test_the_kernels_of_a_gpu_are_asked_for_the_attention_of_a_cpu(kernel, chunks, scale, monkeypatch):
    package = ModuleType("flash_attn.flash_attn_interface")
    package._flash_attn_varlen_forward = package_by_hand
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    torch.manual_seed(0)
    query = torch.randn(chunks[-1].column + 1, 4, 16)
    keys, values = torch.randn(2, 2, 90, 16).unbind(0)
    ragged = Ragged([], [], chunks, CPU, kernel)
    with TorchsFlashByHand():
        found = kernel(query, keys, values, ragged, scale)
    torch.testing.assert_close(found, one_by_one(query, keys, values, ragged, scale))


def test_a_new_token_sees_its_sequence_up_to_itself_and_nothing_else():
    """The plain attention, token by token: softmax over the keys of the rows that it may see."""
    torch.manual_seed(0)
    query = torch.randn(MIXED[-1].column + 1, 4, 16, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 90, 16, dtype=torch.float64).unbind(0)
    found = one_by_one(query, keys, values, Ragged([], [], MIXED, CPU, one_by_one), 0.4)
    for chunk in MIXED:
        for number in range(chunk.count):
            seen = slice(chunk.start, chunk.start + chunk.length - chunk.count + number + 1)
            for head in range(4):
                weights = (keys[head // 2, seen] @ query[chunk.column + number, head] * 0.4).softmax(0)
                expected = weights @ values[head // 2, seen]
                torch.testing.assert_close(found[chunk.column + number, head], expected)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_without_a_gpu_or_16_bits_each_sequence_attends_by_itself(device, dtype):
    assert choose_kernel(torch.device(device), dtype, 4, 2, 16) is one_by_one
