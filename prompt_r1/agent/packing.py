"""Pack games into one row without padding.

    tokens      [opening | game 1 | game 2 | … ][opening | game 1 | … ]      one row of T tokens
                 \\__________ group __________/

Each token attends to the opening of its group and to the earlier tokens of its own game. The last token of a
game is only a target, so it is not in the row. Attention has three implementations with the same result:
`merged` on CPUs, `varlen` on GPUs in 16 bits, and the reference `game_by_game` on any device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prompt_r1.agent.attention import Window, attend_in_window, is_shorter
from prompt_r1.types import Trajectory


@dataclass(frozen=True)
class Group:
    """Games with a common opening in a packed row: the opening's columns, then the columns of each game."""

    start: int  # first column
    opening: int  # tokens of the opening
    games: tuple[int, ...]  # tokens of each game after the opening; empty for a single game

    @property
    def end(self) -> int:
        return self.start + self.opening + sum(self.games)

    @property
    def longest_game(self) -> int:
        return self.opening + max(self.games, default=0)

    @property
    def opening_columns(self) -> slice:
        return slice(self.start, self.start + self.opening)

    @property
    def game_columns(self) -> Iterator[slice]:
        """The columns of each game after the opening; games without any are left out."""
        start = self.start + self.opening
        for length in self.games:
            if length:
                yield slice(start, start + length)
            start += length


@dataclass(frozen=True)
class Packed:
    """A row of T tokens, and its N scored tokens: the agent's own, in the order of the games."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) of each token in its game
    groups: tuple[Group, ...]
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
        start, opening = len(tokens), games[0].opening
        # A single game is all opening: one causal block.
        shared = opening if len(games) > 1 else len(games[0].tokens) - 1
        tokens += games[0].tokens[:shared]
        positions += range(shared)
        lengths: list[int] = []
        for game in games:
            assert game.opening == opening and game.tokens[:shared] == tokens[start : start + shared]
            own_start = len(tokens)
            for position, sampled in enumerate(game.sampled):
                if sampled:
                    # The token before predicts it. That one is in the opening, or among the game's own.
                    source = position - 1
                    in_opening = source < shared
                    sources.append(start + source if in_opening else own_start + source - shared)
                    targets.append(game.tokens[position])
            tokens += game.tokens[shared:-1]
            positions += range(shared, len(game.tokens) - 1)
            lengths.append(len(game.tokens) - 1 - shared)
        layout.append(Group(start, shared, tuple(lengths) if len(games) > 1 else ()))
    row = torch.tensor([tokens, positions], device=device)
    scored = torch.tensor([sources, targets], device=device)
    return Packed(row[0], row[1], tuple(layout), sources=scored[0], targets=scored[1])


# Attention over a packed row

Groups = tuple[Group, ...]
GroupAttention = Callable[[Groups, Tensor, Tensor, Tensor, float, Window], Tensor]
"""The groups of a row, (H, T, D) queries, (Hkv, T, D) keys and values, the scale, the layer's window →
(H, T, D).
"""


def attention_on(device: torch.device, dtype: torch.dtype) -> GroupAttention:
    """The fastest attention over packed rows on a device: FlashAttention computes in 16 bits only."""
    if device.type == "cpu":
        return merged
    return varlen if dtype.itemsize == 2 else game_by_game


def game_by_game(
    groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window = None
) -> Tensor:
    """Compute each game separately, its opening included, with torch's SDPA: any device and dtype."""
    out: list[Tensor] = []
    for group in groups:
        shared = group.opening_columns
        out.append(_causal(query[:, shared], key[:, shared], value[:, shared], scale, window))
        for own in group.game_columns:
            q, k, v = (torch.cat([rows[:, shared], rows[:, own]], 1) for rows in (query, key, value))
            out.append(_causal(q, k, v, scale, window)[:, group.opening :])
    return torch.cat(out, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window) -> Tensor:
    if is_shorter(window, query.shape[1]):
        return attend_in_window(query, key, value, scale, window)
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=len(query) != len(key)
    )[0]


def merged(
    groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window = None
) -> Tensor:
    """Attend to the opening and to a game's own tokens separately, and merge by their log-sum-exps (CPU).

    Nothing is computed twice or copied, and only the causal triangles compute masked entries. Layers whose
    window is shorter than these games are computed game by game.
    """
    if is_shorter(window, max(group.longest_game for group in groups)):
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
        grad_query, grad_key, grad_value = (torch.empty_like(rows) for rows in (query, key, value))
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
            if causal:  # the first block of these columns
                grad_query[:, queries] = part_query[0]
                grad_key[:, keys] = part_key[0]
                grad_value[:, keys] = part_value[0]
            else:
                grad_query[:, queries] += part_query[0]
                grad_key[:, keys] += part_key[0]
                grad_value[:, keys] += part_value[0]
        return None, grad_query, grad_key, grad_value, None


def _blocks(groups: Groups) -> Iterator[tuple[slice, slice]]:
    """Columns of queries, and the columns of keys that they see: per group the opening and each game with
    themselves (causal), then all its games with the opening.
    """
    for group in groups:
        opening = group.opening_columns
        yield opening, opening
        for own in group.game_columns:
            yield own, own
        if opening.stop < group.end:
            yield slice(opening.stop, group.end), opening


def varlen(
    groups: Groups, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window = None
) -> Tensor:
    """One call of torch's FlashAttention; each game gets a copy of its opening's keys and values.

    Not measured. Causal with fewer queries than keys is aligned at the bottom right.
    """
    from torch.nn.attention.varlen import varlen_attn  # importing it compiles where torch has no CUDA

    blocks = row_offsets(groups, query.device)
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
        for own in group.game_columns:
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
