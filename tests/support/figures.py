"""Compares the metrics of a run with pinned figures, and tells how this machine rounds."""

import hashlib
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prompt_r1.storage.run_log import read_metrics

EXACT = ("games", "tokens/sampled", "env/calls")  # counts; other metrics may differ by the rounding of a CPU


def check_figures(run: Path, pinned: dict[str, list[float]]) -> None:
    """Compare the first steps of a run with the pinned values of each metric."""
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    for name, figures in pinned.items():
        got = [line[name] for line in lines[: len(figures)]]
        if name in EXACT:
            assert got == figures, name
        else:
            assert got == pytest.approx(figures, rel=1e-3, abs=1e-6), name


@cache
def rounding() -> str:
    """A digest of float32 results on one thread: steps of a decoder block as wide as the mini agent's.

    The number of rows decides which kernels run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digest = hashlib.sha256()
    for rows in (1, 2, 7, 16, 33, 100, 257, 900):
        for tensor in _block_and_gradients(rows):
            digest.update(tensor.detach().numpy().tobytes())
    torch.set_num_threads(threads)
    return digest.hexdigest()[:12]


def _block_and_gradients(rows: int, *, hidden: int = 128, heads: int = 4) -> list[Tensor]:
    """Logits (rows, 500), loss, input and weights after a step of AdamW, and their gradients."""
    shapes = [(rows, hidden), (3 * hidden, hidden), (2 * hidden, hidden), (hidden, 2 * hidden), (500, hidden)]
    x, qkv, up, down, head = leaves = [_fixed(*shape) for shape in shapes]
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    query, key, value = F.linear(normed, qkv).view(1, rows, 3, heads, -1).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    products = (query @ key.mT).softmax(-1) @ value
    hidden_states = x + (attended + products).transpose(1, 2).reshape(rows, hidden)
    logits = F.linear(hidden_states + F.linear(F.silu(F.linear(hidden_states, up)), down), head)
    loss = -(logits.log_softmax(-1)[:, 3].exp() * logits.sin()[:, 5]).mean()
    loss.backward()
    torch.optim.AdamW(leaves, lr=1e-3).step()
    return [logits, loss, *leaves, *(leaf.grad for leaf in leaves)]


def _fixed(*shape: int) -> Tensor:
    """Numbers between -0.25 and 0.25 that are the same everywhere."""
    numbers = torch.arange(shape[0] * shape[1]) * 7919 % 1009
    return (numbers.float() / 2018 - 0.25).view(shape).requires_grad_()
