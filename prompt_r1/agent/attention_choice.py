"""Choose the attention kernels of a device."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from prompt_r1.agent.attention import AttentionShape, Window
from prompt_r1.agent.decode_kernels import RECORDABLE, Chunk, Kernel, one_by_one, ragged_batch
from prompt_r1.agent.packing import Group, GroupAttention, game_by_game, merged, varlen
from prompt_r1.errors import first_line

logger = logging.getLogger(__name__)

ONLY_16_BITS = "FlashAttention computes in 16 bits only"
MIXED = [Chunk(0, 1, 300, 200), Chunk(1, 40, 0, 150), Chunk(41, 1, 160, 7)]
SINGLE = [Chunk(0, 1, 300, 200), Chunk(1, 1, 160, 130)]
# Sequences that share their first 100 tokens, and others.
SHARED = [
    Chunk(0, 1, 300, 250, shared=100, shared_start=10),
    Chunk(1, 30, 110, 140, shared=100, shared_start=10),
    Chunk(31, 9, 460, 9),
    Chunk(40, 1, 0, 9),
]
SHARED_SINGLE = [SHARED[0], Chunk(1, 1, 110, 140, shared=100, shared_start=10), Chunk(2, 1, 0, 9)]


@dataclass(frozen=True)
class Place:
    """Where attention is computed, and for which model."""

    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype

    @property
    def is_gpu_in_16_bits(self) -> bool:
        return self.device.type == "cuda" and self.dtype.itemsize == 2


@dataclass(frozen=True)
class AttentionChoice:
    """The implementations of attention of a model on a device."""

    place: Place
    decode: Kernel  # in rollouts, over the KV cache
    packed: GroupAttention  # in updates
    shares_rows: bool  # games with the same prompt may share its rows of the cache
    why_decode: str  # why no faster one was chosen, or ""
    why_packed: str


@cache
def choose_attention(place: Place) -> AttentionChoice:
    """The first implementations that run here and agree with the plain ones on random data.

    Do not call this inside a model's forward: gradient checkpointing would count its tensors.
    """
    decode, reasons = one_by_one, []
    if place.device.type != "cuda":
        reasons.append("FlashAttention needs a GPU")
    elif place.dtype.itemsize != 2:
        reasons.append(ONLY_16_BITS)
    else:
        for kernel in RECORDABLE:
            reason = why_not_decode(kernel, place)
            if not reason:
                decode = kernel
                break
            reasons.append(f"{kernel.__name__}: {reason}")
    # `one_by_one` copies shared rows in every forward, so there it is better to copy them once.
    shares_rows = decode in RECORDABLE and not place.shape.windows and can_share_rows(decode, place)
    fastest = merged if place.device.type == "cpu" else varlen
    why_packed = why_not_packed(fastest, place)
    packed = game_by_game if why_packed else fastest
    return AttentionChoice(place, decode, packed, shares_rows, "; ".join(reasons), why_packed)


def describe_attention(choice: AttentionChoice) -> str:
    """One line: the attention of rollouts and of updates, and why not a faster one.

    On a GPU in 16 bits, computing sequence by sequence is slow: a decode step of 64 games would launch 2,304
    kernels for attention alone.
    """
    line = (
        f"attention: {choice.decode.__name__} in rollouts{_in_brackets(choice.why_decode)}, "
        f"{choice.packed.__name__} in updates{_in_brackets(choice.why_packed)}"
    )
    slow = choice.decode is one_by_one or choice.packed is game_by_game
    warning = ": this is slow on a GPU; another version of torch may be faster"
    return line + (warning if slow and choice.place.is_gpu_in_16_bits else "")


def warn_if_slow(choice: AttentionChoice, name: str) -> None:
    """Warn that a model which only generates does so without FlashAttention, and why."""
    if choice.decode is one_by_one and choice.place.is_gpu_in_16_bits:
        logger.warning(
            "%s attends to one sequence after the other, slowly for a GPU: %s", name, choice.why_decode
        )


def why_not_decode(kernel: Kernel, place: Place) -> str:
    """Why a kernel of RECORDABLE cannot be used here; "" if it agrees with `one_by_one` on random data."""
    windows = [None, 37] if place.shape.windows else [None]
    return _failure_of(lambda: _compare_decode(kernel, [MIXED, SINGLE], place, windows))


def can_share_rows(kernel: Kernel, place: Place) -> bool:
    """Whether a kernel of RECORDABLE agrees with `one_by_one` where sequences share rows."""
    return not _failure_of(lambda: _compare_decode(kernel, [SHARED, SHARED_SINGLE], place, [None]))


def why_not_packed(attention: GroupAttention, place: Place) -> str:
    """Why `merged` or `varlen` cannot be used here; "" if it agrees with `game_by_game`."""
    if place.device.type != "cpu" and place.dtype.itemsize != 2:
        return ONLY_16_BITS
    return _failure_of(lambda: _compare_packed(attention, place))


def _failure_of(compare: Callable[[], None]) -> str:
    """Why a comparison failed: not installed, not built for this device, another signature or result."""
    try:
        compare()
    except (AssertionError, ImportError, AttributeError, RuntimeError, TypeError) as error:
        return first_line(error)
    return ""


def _compare_decode(
    kernel: Kernel, batches: Sequence[list[Chunk]], place: Place, windows: Sequence[Window]
) -> None:
    """Assert that a kernel agrees with `one_by_one`, in each of the windows."""
    shape = place.shape

    def random_rows(*size: int) -> Tensor:
        return torch.randn(size, dtype=place.dtype, device=place.device)

    for window in windows:
        keys, values = random_rows(2, shape.kv_heads, 512, shape.dim)
        for chunks in batches:
            query = random_rows(chunks[-1].column + 1, shape.heads, shape.dim)
            batch = ragged_batch(chunks, kernel, place.device)
            expected = one_by_one(query, keys, values, batch, shape.dim**-0.5, window)
            found = kernel(query, keys, values, batch, shape.dim**-0.5, window)
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def _compare_packed(attention: GroupAttention, place: Place) -> None:
    """Assert that an attention agrees with `game_by_game`, forward and backward."""
    shape, generator = place.shape, torch.Generator().manual_seed(0)
    groups = (Group(0, 9, (4, 30, 0)), Group(43, 5, ()))
    tolerance = 5e-2 if place.dtype.itemsize == 2 else 1e-4
    inputs = [  # queries, keys, values and the gradient of the output
        torch.randn(count, 48, shape.dim, generator=generator).to(place.device, place.dtype)
        for count in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    ]
    for window in [None, 7] if shape.windows else [None]:
        found = _with_gradients(attention, window, groups, inputs)
        expected = _with_gradients(game_by_game, window, groups, inputs)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@torch.enable_grad()
def _with_gradients(
    attention: GroupAttention, window: Window, groups: tuple[Group, ...], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    query, key, value = (rows.clone().requires_grad_() for rows in inputs[:3])
    out = attention(groups, query, key, value, 0.1, window)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), inputs[3])]


def _in_brackets(reason: str) -> str:
    return f" ({reason})" if reason else ""
