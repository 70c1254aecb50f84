"""Attention over a packed row: each token sees the opening of its group and its own game so far.

Three implementations with the same result: `merged` on CPUs, `varlen` on GPUs in 16 bits, and the reference
`game_by_game` on any device.
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
from prompt_r1.agent.scores import PLAIN, ScoreRules, attend_by_rules

Groups = tuple[Group, ...]
GroupAttention = Callable[[Groups, Tensor, Tensor, Tensor, float, ScoreRules], Tensor]
"""The groups of a row, (H, T, D) queries, (Hkv, T, D) keys and values, the scale, the layer's rules →
(H, T, D).
"""


@cache
def choose_attention(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, *, windows: bool = False
) -> GroupAttention:
    """The fastest implementation that agrees with `game_by_game` on random data, forward and backward.

    `windows`: whether some layers have a sliding window.

    Do not call this inside a model's forward: gradient checkpointing would count its tensors.
    """
    if rejection(device, dtype, heads, kv_heads, dim, windows=windows):
        return game_by_game
    return merged if device.type == "cpu" else varlen


@cache
def rejection(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, *, windows: bool
) -> str:
    """Why neither `merged` on a CPU nor `varlen` on a GPU can be used here; "" if it can."""
    if device.type != "cpu" and dtype.itemsize != 2:
        return "FlashAttention computes in 16 bits only"
    attention: GroupAttention = merged if device.type == "cpu" else varlen
    groups = (Group(0, 9, (4, 30, 0)), Group(43, 5, ()))
    generator = torch.Generator().manual_seed(0)
    tolerance = 5e-2 if dtype.itemsize == 2 else 1e-4
    # Not built in, another signature, or another result.
    try:
        # Queries, keys, values and the gradient of the output.
        inputs = [
            torch.randn(count, 48, dim, generator=generator).to(device, dtype)
            for count in (heads, kv_heads, kv_heads, heads)
        ]
        for rules in [PLAIN, ScoreRules(window=7)] if windows else [PLAIN]:
            found = _with_gradients(attention, rules, groups, *inputs)
            expected = _with_gradients(game_by_game, rules, groups, *inputs)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    except (AssertionError, ImportError, RuntimeError, TypeError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


@torch.enable_grad()
def _with_gradients(
    attention: GroupAttention,
    rules: ScoreRules,
    groups: Groups,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    query, key, value = (rows.clone().requires_grad_() for rows in (query, key, value))
    out = attention(groups, query, key, value, 0.1, rules)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad)]


def game_by_game(
    groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float, rules: ScoreRules = PLAIN
) -> Tensor:
    """Compute each game separately, its opening included, with torch's SDPA: any device, dtype and rules."""
    out: list[Tensor] = []
    for group in groups:
        opening = _opening(group)
        out.append(_causal(query[:, opening], key[:, opening], value[:, opening], scale, rules))
        for own in _games(group):
            q, k, v = (torch.cat([rows[:, opening], rows[:, own]], 1) for rows in (query, key, value))
            out.append(_causal(q, k, v, scale, rules)[:, group.opening :])
    return torch.cat(out, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float, rules: ScoreRules) -> Tensor:
    if rules.applies(query.shape[1]):
        return attend_by_rules(query, key, value, scale, rules)
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=len(query) != len(key)
    )[0]


def _opening(group: Group) -> slice:
    """The columns of a group's opening."""
    return slice(group.start, group.start + group.opening)


def _games(group: Group) -> Iterator[slice]:
    """The columns of each game after the opening; games without any are left out."""
    start = group.start + group.opening
    for length in group.games:
        if length:
            yield slice(start, start + length)
        start += length


def _longest_game(groups: Groups) -> int:
    return max(group.opening + max(group.games, default=0) for group in groups)


def merged(
    groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float, rules: ScoreRules = PLAIN
) -> Tensor:
    """Attend to the opening and to a game's own tokens separately, and merge by their log-sum-exps (CPU).

    Nothing is computed twice or copied, and only the causal triangles compute masked entries. Layers whose
    rules matter for these games are computed game by game.
    """
    if rules.applies(_longest_game(groups)):
        return game_by_game(groups, query, key, value, scale, rules)
    return _Merged.apply(groups, query, key, value, scale)


class _Merged(torch.autograd.Function):
    """Softmax over two sets of keys = the two softmaxes, weighted by exp(log-sum-exp) of each.

    Backward: given the final output and log-sum-exp of a query, FlashAttention's backward returns the exact
    gradient through any subset of its keys.
    """

    @staticmethod
    def forward(ctx: Any, groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in _blocks(groups):
            queries, keys = block.queries, block.keys
            rows = (query[None, :, queries], key[None, :, keys], value[None, :, keys])
            part, logsumexp = (result[0] for result in flash(*rows, 0.0, block.causal, scale=scale))
            if block.causal:  # the first block of these queries
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
        grad_query, grad_key, grad_value = (torch.empty_like(rows) for rows in (query, key, value))
        for block in _blocks(ctx.groups):
            queries, keys = block.queries, block.keys
            part_query, part_key, part_value = flash(
                grad[None, :, queries],
                query[None, :, queries],
                key[None, :, keys],
                value[None, :, keys],
                out[None, :, queries],
                sums[None, :, queries],
                0.0,  # dropout
                block.causal,
                scale=ctx.scale,
            )
            if block.causal:  # the first block of these columns
                grad_query[:, queries] = part_query[0]
                grad_key[:, keys] = part_key[0]
                grad_value[:, keys] = part_value[0]
            else:
                grad_query[:, queries] += part_query[0]
                grad_key[:, keys] += part_key[0]
                grad_value[:, keys] += part_value[0]
        return None, grad_query, grad_key, grad_value, None


@dataclass(frozen=True)
class _Block:
    """Columns of queries and the columns of keys that they see."""

    queries: slice
    keys: slice

    @property
    def causal(self) -> bool:
        return self.queries == self.keys


def _blocks(groups: Groups) -> Iterator[_Block]:
    """Per group: the causal block of the opening and of each game, then all its games with the opening."""
    for group in groups:
        opening = _opening(group)
        yield _Block(opening, opening)
        for own in _games(group):
            yield _Block(own, own)
        if opening.stop < group.end:
            yield _Block(slice(opening.stop, group.end), opening)


def varlen(
    groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float, rules: ScoreRules = PLAIN
) -> Tensor:
    """One call of torch's FlashAttention; each game gets a copy of its opening's keys and values.

    Not measured. Causal with fewer queries than keys is aligned at the bottom right. Layers with soft caps or
    sinks are computed game by game.
    """
    if rules.explicit:
        return game_by_game(groups, query, key, value, scale, rules)
    from torch.nn.attention.varlen import varlen_attn  # importing it compiles where torch has no CUDA

    blocks = row_offsets(groups, query.device)
    keys, values = (rows.transpose(0, 1).index_select(0, blocks.columns) for rows in (key, value))
    # Older versions of torch share key heads without being told.
    takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    attend = partial(varlen_attn, enable_gqa=True) if takes_gqa else varlen_attn
    out = attend(
        query.transpose(0, 1).contiguous(),
        keys,
        values,
        blocks.queries,
        blocks.keys,
        blocks.longest_query,
        blocks.longest_key,
        scale=scale,
        window_size=(-1 if rules.window is None else rules.window - 1, 0),
    )
    assert isinstance(out, Tensor), "the log-sum-exp was not requested"
    return out.transpose(0, 1)


@dataclass(frozen=True)
class RowOffsets:
    """The causal blocks of a packed row in the form that FlashAttention reads."""

    queries: Tensor  # (blocks + 1,) first columns
    keys: Tensor  # (blocks + 1,) first rows among the copied keys
    columns: Tensor  # the column of the row that each copied key comes from
    longest_query: int
    longest_key: int


@lru_cache(maxsize=1)  # the same for all layers of a forward
def row_offsets(groups: Groups, device: torch.device) -> RowOffsets:
    """Where each causal block of a packed row begins and ends, for variable-length kernels."""
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
    return RowOffsets(
        torch.tensor(queries, dtype=torch.int32, device=device),
        torch.tensor(keys, dtype=torch.int32, device=device),
        torch.tensor(columns, device=device),
        max(end - start for start, end in pairwise(queries)),
        max(end - start for start, end in pairwise(keys)),
    )
