"""Several games in one row without padding; what the games of a question have in common stands there once.

    tokens      [opening | game 1 | game 2 | … ][opening | game 1 | … ]      one row of T tokens
                 \\__________ group __________/

Each token sees the opening of its group and what its own game has said so far. The last token of a game is
only a target, never an input.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prompt_r1.types import Trajectory


@dataclass(frozen=True)
class Group:
    """Games with a common opening in a packed row: columns [start, start + opening), then each game's own."""

    start: int
    opening: int  # tokens
    games: tuple[int, ...]  # tokens of each game after the opening; empty for a game on its own

    @property
    def end(self) -> int:
        return self.start + self.opening + sum(self.games)


@dataclass(frozen=True)
class Packed:
    """A row of T tokens and the N scored ones, the agent's own, in the order of the games."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) of each token in its game
    groups: tuple[Group, ...]
    sources: Tensor  # (N,) the columns whose next-token distributions are scored
    targets: Tensor  # (N,) int64 the tokens that followed


def pack(groups: Sequence[Sequence[Trajectory]], device: torch.device) -> Packed:
    """One row of groups; the games of a group must have the same opening."""
    tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    layout: list[Group] = []
    for games in groups:
        start, opening = len(tokens), games[0].opening
        # A game on its own is all opening: one causal block.
        shared = opening if len(games) > 1 else len(games[0].tokens) - 1
        tokens += games[0].tokens[:shared]
        positions += range(shared)
        for game in games:
            assert game.opening == opening and game.tokens[:shared] == tokens[start : start + shared]
            # Column of position t: in the opening, or after what stands in the row so far.
            scored = [t for t, sampled in enumerate(game.sampled) if sampled]
            sources += [start + t - 1 if t <= shared else len(tokens) + t - 1 - shared for t in scored]
            targets += [game.tokens[t] for t in scored]
            tokens += game.tokens[shared:-1]
            positions += range(shared, len(game.tokens) - 1)
        own = tuple(len(game.tokens) - 1 - shared for game in games) if len(games) > 1 else ()
        layout.append(Group(start, shared, own))
    whole = torch.tensor([tokens, positions], device=device)
    scores = torch.tensor([sources, targets], device=device)
    return Packed(whole[0], whole[1], tuple(layout), scores[0], scores[1])


def fill(games: Sequence[Trajectory], tokens_per_batch: int) -> list[list[list[int]]]:
    """Batches of groups of games, as indices: first fit by decreasing length, so that few rows are short.

    A batch has at most `tokens_per_batch` tokens, openings counted once for their group, or one game. A group
    that is longer than that is split, and each part has the opening again.
    """
    parts = [part for group in _by_opening(games) for part in _split(games, group, tokens_per_batch)]
    parts.sort(key=lambda part: _length(games, part), reverse=True)
    batches: list[list[list[int]]] = []
    room: list[int] = []
    for part in parts:
        length = _length(games, part)
        number = next((n for n, left in enumerate(room) if length <= left), len(batches))
        if number == len(batches):
            batches.append([])
            room.append(tokens_per_batch)
        batches[number].append(part)
        room[number] -= length
    return batches


def _by_opening(games: Sequence[Trajectory]) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, game in enumerate(games):
        groups.setdefault(tuple(game.tokens[: game.opening]), []).append(number)
    return list(groups.values())


def _split(games: Sequence[Trajectory], group: list[int], limit: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for number in sorted(group, key=lambda number: len(games[number].tokens), reverse=True):
        part = next((part for part in parts if _length(games, [*part, number]) <= limit), None)
        if part is None:
            parts.append(part := [])
        part.append(number)
    return parts


def _length(games: Sequence[Trajectory], part: list[int]) -> int:
    """Columns that a group takes."""
    opening = games[part[0]].opening
    return opening + sum(len(games[number].tokens) - 1 - opening for number in part)
