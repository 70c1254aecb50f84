"""Pack games into one row without padding.

    tokens      [opening | game 1 | game 2 | … ][opening | game 1 | … ]      one row of T tokens
                 \\__________ group __________/

A group has games with the same opening. Each token attends to the opening of its group, and to the earlier
tokens of its own game. The last token of a game is only a target, so it is not in the row. A *column* is a
place in the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from prompt_r1.model.attention import Mask, RowAttention, Window, attend_in_window, causal_mask
from prompt_r1.types import Trajectory


@dataclass(frozen=True)
class Group:
    """How many tokens of a row the games of one group take."""

    opening: int  # The tokens of the opening, which is in the row once.
    new_tokens: list[int]  # The tokens that each game adds to the row. The first game also adds the opening.


@dataclass(frozen=True)
class Packed:
    """A row of T tokens, and its N scored tokens: the agent's own, in the order of the games."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) the position of each token in its game
    groups: Sequence[Group]
    sources: Tensor  # (N,) the columns whose next-token distributions are scored
    targets: Tensor  # (N,) int64, the scored tokens: each follows the token in its source

    @property
    def attend(self) -> RowAttention:
        """The attention of one forward. Each use of this property makes a new cache of masks."""
        # The layers of a forward share their masks. The masks are freed with the graph of the forward.
        mask = cache(causal_mask)
        return partial(self._attend, mask)

    def _attend(
        self, mask: Mask, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Let each game attend to its opening and to itself. Shapes: `RowAttention`.

        For each game, the keys and values of the opening are copied in front of the game's own.
        """
        # Norms of queries and keys may return float32. This is the compute dtype again.
        query, key = query.to(value.dtype), key.to(value.dtype)
        # Split once. A slice for each game would have a gradient as large as the row.
        sizes = [count for group in self.groups for count in group.new_tokens]
        parts = zip(query.split(sizes, 1), key.split(sizes, 1), value.split(sizes, 1), strict=True)
        out: list[Tensor] = []
        for group in self.groups:
            queries, keys, values = next(parts)  # the opening and the first game
            out.append(attend_in_window(queries, keys, values, scale, window, mask))
            for _ in group.new_tokens[1:]:
                queries, own_keys, own_values = next(parts)
                keys = torch.cat([keys[:, : group.opening], own_keys], 1)
                values = torch.cat([values[:, : group.opening], own_values], 1)
                out.append(attend_in_window(queries, keys, values, scale, window, mask))
        # Most kernels of SDPA write (T, H, D), so this transposition copies nothing.
        return torch.cat([part.transpose(0, 1) for part in out])


def pack(groups: Sequence[Sequence[Trajectory]], device: torch.device) -> Packed:
    """Pack groups of games into one row. The games of a group must have the same opening.

    Without games the row has one token, which is not scored.
    """
    tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    packed_groups: list[Group] = []
    for games in groups:
        opening = games[0].opening_length
        group_start = len(tokens)
        new_tokens: list[int] = []
        for number, game in enumerate(games):
            assert game.tokens[: game.opening_length] == games[0].tokens[:opening], "one opening"
            start = 0 if number == 0 else opening  # the position of the first token that the game adds
            end = len(game.tokens) - 1
            # The column of each position: first the tokens of the opening that are in the row already.
            added = range(len(tokens), len(tokens) + end - start)
            columns = [*range(group_start, group_start + start), *added]
            for position, sampled in enumerate(game.sampled):
                if sampled:
                    sources.append(columns[position - 1])  # The token before predicts the sampled token.
                    targets.append(game.tokens[position])
            tokens += game.tokens[start:end]
            positions += range(start, end)
            if start < end:
                new_tokens.append(end - start)
        packed_groups.append(Group(opening, new_tokens))
    if not groups:
        tokens, positions, packed_groups = [0], [0], [Group(0, [1])]
    return Packed(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        packed_groups,
        sources=torch.tensor(sources, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
    )
