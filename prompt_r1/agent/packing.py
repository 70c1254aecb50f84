"""Pack games into one row without padding.

    tokens      [opening | game 1 | game 2 | … ][opening | game 1 | … ]      one row of T tokens
                 \\__________ group __________/

Each token attends to the opening of its group and to the earlier tokens of its own game. The last token of a
game is only a target, so it is not in the row. Attention has three implementations with the same result:
`merged` on CPUs, `varlen` on GPUs in 16 bits, and the reference `game_by_game` on any device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from prompt_r1.agent.attention import PackedAttention, Window, attend_in_window
from prompt_r1.types import Trajectory


@dataclass(frozen=True)
class Group:
    """The columns of games with a common opening in a packed row."""

    opening: slice  # all of a single game
    games: tuple[slice, ...]  # what each game has after the opening; games without any are left out

    @property
    def longest_game(self) -> int:
        """Tokens of the longest game, its opening included."""
        return _length(self.opening) + max(map(_length, self.games), default=0)


def _length(columns: slice) -> int:
    return int(columns.stop - columns.start)


Groups = tuple[Group, ...]


@dataclass(frozen=True)
class Packed:
    """A row of T tokens, and its N scored tokens: the agent's own, in the order of the games."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) of each token in its game
    groups: Groups
    sources: Tensor  # (N,) columns whose next-token distributions are scored
    targets: Tensor  # (N,) int64 the tokens that followed


def pack(groups: Sequence[Sequence[Trajectory]], device: torch.device) -> Packed:
    """Pack groups of games into one row. The games of a group must have the same opening."""
    tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    layout: list[Group] = []
    for games in groups:
        first = games[0]
        # A single game is all opening: one causal block.
        shared = first.opening if len(games) > 1 else len(first.tokens) - 1
        opening = slice(len(tokens), len(tokens) + shared)
        tokens += first.tokens[:shared]
        positions += range(shared)
        own: list[slice] = []
        for game in games:
            assert game.opening == first.opening and game.tokens[:shared] == tokens[opening]
            own.append(slice(len(tokens), len(tokens) + len(game.tokens) - 1 - shared))
            columns = [*range(opening.start, opening.stop), *range(own[-1].start, own[-1].stop)]
            for position, sampled in enumerate(game.sampled):
                if sampled:
                    sources.append(columns[position - 1])  # the token before predicts it
                    targets.append(game.tokens[position])
            tokens += game.tokens[shared:-1]
            positions += range(shared, len(game.tokens) - 1)
        layout.append(Group(opening, tuple(columns for columns in own if _length(columns))))
    row = torch.tensor([tokens, positions], device=device)
    scored = torch.tensor([sources, targets], device=device)
    return Packed(row[0], row[1], tuple(layout), sources=scored[0], targets=scored[1])


def attention_of(packed: Packed, dtype: torch.dtype) -> PackedAttention:
    """The fastest attention over a packed row on its device: FlashAttention computes in 16 bits only."""
    if packed.tokens.device.type == "cpu":
        return partial(merged, packed.groups)
    if dtype.itemsize == 2:
        return partial(varlen, CausalBlocks.of(packed.groups, packed.tokens.device))
    return partial(game_by_game, packed.groups)


def game_by_game(
    groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window = None
) -> Tensor:
    """Attend to copies of the opening and the game's own keys with torch's SDPA: any device and dtype."""
    out: list[Tensor] = []
    for group in groups:
        shared = group.opening
        out.append(attend_in_window(query[:, shared], key[:, shared], value[:, shared], scale, window))
        for own in group.games:
            keys, values = (torch.cat([rows[:, shared], rows[:, own]], 1) for rows in (key, value))
            out.append(attend_in_window(query[:, own], keys, values, scale, window))
    return torch.cat(out, 1)


def merged(
    groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window = None
) -> Tensor:
    """Attend to the opening and to a game's own tokens separately, and merge by their log-sum-exps (CPU).

    Nothing is computed twice or copied, and only the causal triangles compute masked entries. Layers whose
    window is shorter than these games are computed game by game.
    """
    if window is not None and window < max(group.longest_game for group in groups):
        return game_by_game(groups, query, key, value, scale, window)
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
        for queries, keys in _blocks(groups):
            causal = queries == keys
            rows = (query[None, :, queries], key[None, :, keys], value[None, :, keys])
            part, logsumexp = (result[0] for result in flash(*rows, 0.0, causal, scale=scale))
            if causal:  # the first block of these queries
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
        grad_query, grad_key, grad_value = (torch.zeros_like(rows) for rows in (query, key, value))
        for queries, keys in _blocks(ctx.groups):
            causal = queries == keys
            part_query, part_key, part_value = flash(
                grad[None, :, queries],
                query[None, :, queries],
                key[None, :, keys],
                value[None, :, keys],
                out[None, :, queries],
                sums[None, :, queries],
                0.0,  # dropout
                causal,
                scale=ctx.scale,
            )
            grad_query[:, queries] += part_query[0]
            grad_key[:, keys] += part_key[0]
            grad_value[:, keys] += part_value[0]
        return None, grad_query, grad_key, grad_value, None


def _blocks(groups: Groups) -> Iterator[tuple[slice, slice]]:
    """Columns of queries, and the columns of keys that they see: per group the opening and each game with
    themselves (causal), then all its games with the opening.
    """
    for group in groups:
        for columns in (group.opening, *group.games):
            yield columns, columns
        if group.games:
            yield slice(group.opening.stop, group.games[-1].stop), group.opening


@dataclass(frozen=True)
class CausalBlocks:
    """The openings and games of a packed row in the form that FlashAttention reads."""

    queries: Tensor  # (blocks + 1,) int32 first columns
    keys: Tensor  # (blocks + 1,) int32 first rows among the copied keys
    columns: Tensor  # the column of the row that each copied key comes from
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, groups: Groups, device: torch.device) -> "CausalBlocks":
        """Each opening is a block, and each game with a copy of its opening's keys."""
        columns: list[int] = []
        queries, keys = [0], [0]
        for group in groups:
            opening = range(group.opening.start, group.opening.stop)
            for own in (range(0), *(range(game.start, game.stop) for game in group.games)):
                columns += [*opening, *own]
                queries.append(own.stop or opening.stop)
                keys.append(len(columns))
        return cls(
            torch.tensor(queries, dtype=torch.int32, device=device),
            torch.tensor(keys, dtype=torch.int32, device=device),
            torch.tensor(columns, device=device),
            max(end - start for start, end in pairwise(queries)),
            max(end - start for start, end in pairwise(keys)),
        )


def varlen(
    blocks: CausalBlocks, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window = None
) -> Tensor:
    """One call of torch's FlashAttention. Not measured.

    Causal with fewer queries than keys is aligned at the bottom right.
    """
    from torch.nn.attention.varlen import varlen_attn  # importing it compiles where torch has no CUDA

    keys, values = (rows.transpose(0, 1).index_select(0, blocks.columns) for rows in (key, value))
    out = varlen_attn(
        query.transpose(0, 1).contiguous(),
        keys,
        values,
        blocks.queries,
        blocks.keys,
        blocks.longest_query,
        blocks.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor), "the log-sum-exp was not requested"
    return out.transpose(0, 1)
