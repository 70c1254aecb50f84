"""Pack several games into one row without padding; games of a question share their opening.

    tokens      [opening | game 1 | game 2 | … ][opening | game 1 | … ]      one row of T tokens
                 \\__________ group __________/

Each token attends to the opening of its group and to the earlier tokens of its own game. The last token of a
game is only a target, so it is not in the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def fill(games: Sequence[Trajectory], tokens_per_batch: int) -> list[list[list[int]]]:
    """Divide games into batches of groups: the numbers of the games of each group of each batch.

    First fit by decreasing length, so that few batches are short. A batch has at most `tokens_per_batch`
    tokens, the opening of a group counted once, or a single game. A longer group is split, and each part
    repeats the opening.
    """
    parts: list[list[int]] = []
    for group in by_opening(games):
        parts += _split(games, group, tokens_per_batch)
    parts.sort(key=lambda part: _length(games, part), reverse=True)
    batches: list[list[list[int]]] = []
    free: list[int] = []  # tokens that still fit into each batch
    for part in parts:
        length = _length(games, part)
        fitting = [number for number, room in enumerate(free) if length <= room]
        if fitting:
            number = fitting[0]
        else:
            number = len(batches)
            batches.append([])
            free.append(tokens_per_batch)
        batches[number].append(part)
        free[number] -= length
    return batches


def by_opening(games: Sequence[Trajectory]) -> list[list[int]]:
    """The numbers of the games with each opening."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, game in enumerate(games):
        groups.setdefault(tuple(game.tokens[: game.opening]), []).append(number)
    return list(groups.values())


def _split(games: Sequence[Trajectory], group: list[int], limit: int) -> list[list[int]]:
    """Split a group into parts of at most `limit` tokens or a single game: first fit, longest games first."""
    parts: list[list[int]] = []
    for number in sorted(group, key=lambda number: len(games[number].tokens), reverse=True):
        fitting = [part for part in parts if _length(games, [*part, number]) <= limit]
        if fitting:
            fitting[0].append(number)
        else:
            parts.append([number])
    return parts


def _length(games: Sequence[Trajectory], part: list[int]) -> int:
    """Columns that the games of a group take in a row."""
    opening = games[part[0]].opening
    return opening + sum(len(games[number].tokens) - 1 - opening for number in part)
