"""Attention of a packed row: each token sees the opening of its group and its own game so far.

Three ways to the same numbers: `merged` on CPUs, `varlen` on GPUs in 16 bits, and `game_by_game` anywhere.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prompt_r1.agent.packing import Group

Groups = tuple[Group, ...]
Attention = Callable[[Groups, Tensor, Tensor, Tensor, float], Tensor]
"""The groups of a row, (H, T, D) queries, (Hkv, T, D) keys and values, the scale → (H, T, D)."""


@cache
def choose_attention(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> Attention:
    """The fastest way that agrees with `game_by_game` on random data, forward and backward.

    Not to be called inside a model's forward: gradient checkpointing would count its tensors.
    """
    attention = merged if device.type == "cpu" else varlen if dtype.itemsize == 2 else game_by_game
    groups = (Group(0, 9, (4, 30, 0)), Group(43, 5, ()))
    noise = torch.Generator().manual_seed(0)
    rows = [torch.randn(h, 48, dim, generator=noise) for h in (heads, kv_heads, kv_heads, heads)]
    inputs = [row.to(device, dtype) for row in rows]
    tolerance = 5e-2 if dtype.itemsize == 2 else 1e-4
    try:
        got, expected = (_with_gradients(way, groups, *inputs) for way in (attention, game_by_game))
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    except (RuntimeError, TypeError, ImportError, AssertionError):  # not built in, another signature or sum
        return game_by_game
    return attention


@torch.enable_grad()
def _with_gradients(
    attention: Attention, groups: Groups, query: Tensor, key: Tensor, value: Tensor, grad: Tensor
) -> list[Tensor]:
    query, key, value = (rows.clone().requires_grad_() for rows in (query, key, value))
    out = attention(groups, query, key, value, 0.1)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad)]


def game_by_game(groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Each game as if it were alone, its opening included: torch's SDPA, any device and dtype."""
    out: list[Tensor] = []
    for group in groups:
        opening = slice(group.start, group.start + group.opening)
        out.append(_causal(query[:, opening], key[:, opening], value[:, opening], scale))
        for own in _games(group):
            q, k, v = (torch.cat([rows[:, opening], rows[:, own]], 1) for rows in (query, key, value))
            out.append(_causal(q, k, v, scale)[:, group.opening :])
    return torch.cat(out, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=len(query) != len(key)
    )[0]


def _games(group: Group) -> Iterator[slice]:
    """The columns of each game after the opening."""
    start = group.start + group.opening
    for length in group.games:
        if length:
            yield slice(start, start + length)
        start += length


def merged(groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The opening and a game's own tokens attended to apart and joined by their log-sum-exps (CPU).

    Nothing is computed or copied twice, and nothing masked is computed but causal triangles.
    """
    return _Merged.apply(groups, query, key, value, scale)


class _Merged(torch.autograd.Function):
    """softmax over two sets of keys = the two softmaxes, weighted by exp(log-sum-exp) of each.

    Backward: FlashAttention's backward needs only the final output and log-sum-exp of a row to give the exact
    gradient through any part of its keys.
    """

    @staticmethod
    def forward(ctx: Any, groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for queries, keys, causal in _parts(groups):
            rows = (query[None, :, queries], key[None, :, keys], value[None, :, keys])
            part, logsumexp = (result[0] for result in flash(*rows, 0.0, causal, scale=scale))
            if keys == queries:
                out[:, queries], sums[:, queries] = part, logsumexp
            else:
                share = torch.sigmoid(logsumexp - sums[:, queries])[..., None].to(part.dtype)
                out[:, queries].lerp_(part, share)
                sums[:, queries] = torch.logaddexp(sums[:, queries], logsumexp)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        query, key, value, out, sums = ctx.saved_tensors
        grads = [torch.empty_like(rows) for rows in (query, key, value)]
        for queries, keys, causal in _parts(ctx.groups):
            parts = flash(
                grad[None, :, queries], query[None, :, queries], key[None, :, keys], value[None, :, keys],
                out[None, :, queries], sums[None, :, queries], 0.0, causal, scale=ctx.scale,
            )  # fmt: skip
            for total, columns, part in zip(grads, (queries, keys, keys), parts, strict=True):
                if keys == queries:  # the first part of these columns
                    total[:, columns] = part[0]
                else:
                    total[:, columns] += part[0]
        return None, *grads, None


def _parts(groups: Groups) -> Iterator[tuple[slice, slice, bool]]:
    """Which queries see which keys, and whether causally: each column to its own part first."""
    for group in groups:
        opening = slice(group.start, group.start + group.opening)
        yield opening, opening, True
        for own in _games(group):
            yield own, own, True
        if opening.stop < group.end:
            yield slice(opening.stop, group.end), opening, False


def varlen(groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One call of the FlashAttention inside torch; keys and values of an opening are copied to its games.

    Not measured. Causal with fewer queries than keys is aligned at the bottom right.
    """
    from torch.nn.attention.varlen import varlen_attn  # compiles where torch was built without CUDA

    at = offsets(groups, query.device)
    keys, values = (rows.transpose(0, 1).index_select(0, at.columns) for rows in (key, value))
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    attend = partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn
    out = attend(
        query.transpose(0, 1).contiguous(), keys, values, at.queries, at.keys, at.longest_query,
        at.longest_key, scale=scale, window_size=(-1, 0),
    )  # fmt: skip
    assert isinstance(out, Tensor), "the log-sum-exp was not asked for"
    return out.transpose(0, 1)


@dataclass(frozen=True)
class Offsets:
    """The games of a packed row as FlashAttention reads them."""

    queries: Tensor  # (games + 1,) where each one's columns begin
    keys: Tensor  # (games + 1,) where its keys begin among the copied ones
    columns: Tensor  # of the row, for each copied key
    longest_query: int
    longest_key: int


@lru_cache(maxsize=1)  # all layers of a forward have the same
def offsets(groups: Groups, device: torch.device) -> Offsets:
    """Where each causal block of the packed row begins and ends, as variable-length kernels want it."""
    columns: list[int] = []
    queries, keys = [0], [0]
    for group in groups:
        opening = range(group.start, group.start + group.opening)
        columns += opening
        queries.append(opening.stop)
        keys.append(len(columns))
        for own in _games(group):
            columns += [*opening, *range(own.start, own.stop)]
            queries.append(own.stop)
            keys.append(len(columns))
    return Offsets(
        torch.tensor(queries, dtype=torch.int32, device=device),
        torch.tensor(keys, dtype=torch.int32, device=device),
        torch.tensor(columns, device=device),
        max(b - a for a, b in pairwise(queries)),
        max(b - a for a, b in pairwise(keys)),
    )
