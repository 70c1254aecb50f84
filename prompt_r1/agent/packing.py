"""Pack games into one row without padding.

    tokens      [opening | game 1 | game 2 | … ][opening | game 1 | … ]      one row of T tokens
                 \\__________ group __________/

Each token attends to the opening of its group and to the earlier tokens of its own game. The last token of a
game is only a target, so it is not in the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prompt_r1.agent.attention import Window, attend_in_window
from prompt_r1.types import Trajectory


@dataclass(frozen=True)
class Packed:
    """A row of T tokens, and its N scored tokens: the agent's own, in the order of the games."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) of each token in its game
    sizes: Sequence[Sequence[int]]  # of each group: tokens of the opening, then of the rest of each game
    sources: Tensor  # (N,) columns whose next-token distributions are scored
    targets: Tensor  # (N,) int64 the tokens that followed

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Attend to the keys of each opening, then of each game, which are copied behind its opening's.

        (H, T, D) queries, (Hkv, T, D) keys and values → (T, H, D), the same in every layer.
        """
        # Query and key norms computed in float32 return float32: back to the compute dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        # Split once: the gradient of a slice is as large as the row.
        sizes = [size for group in self.sizes for size in group]
        parts = zip(query.split(sizes, 1), key.split(sizes, 1), value.split(sizes, 1), strict=True)
        out: list[Tensor] = []
        for _, *games in self.sizes:
            queries, opening_keys, opening_values = next(parts)
            out.append(attend_in_window(queries, opening_keys, opening_values, scale, window))
            for _ in games:
                queries, own_keys, own_values = next(parts)
                keys = torch.cat([opening_keys, own_keys], 1)
                values = torch.cat([opening_values, own_values], 1)
                out.append(attend_in_window(queries, keys, values, scale, window))
        # Contiguous, because some models take a view of it; others copy it anyway.
        return torch.cat(out, 1).transpose(0, 1).contiguous()


def pack(groups: Sequence[Sequence[Trajectory]], device: torch.device) -> Packed:
    """Pack groups of games into one row. The games of a group must have the same opening."""
    tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    sizes: list[list[int]] = []
    for games in groups:
        first = games[0]
        # A single game is all opening: one causal block.
        shared = first.opening if len(games) > 1 else len(first.tokens) - 1
        opening = range(len(tokens), len(tokens) + shared)
        tokens += first.tokens[:shared]
        positions += range(shared)
        sizes.append([shared])
        for game in games:
            assert game.opening == first.opening and game.tokens[:shared] == first.tokens[:shared]
            size = len(game.tokens) - 1 - shared
            columns = [*opening, *range(len(tokens), len(tokens) + size)]
            for position, sampled in enumerate(game.sampled):
                if sampled:
                    sources.append(columns[position - 1])  # the token before predicts it
                    targets.append(game.tokens[position])
            tokens += game.tokens[shared:-1]
            positions += range(shared, len(game.tokens) - 1)
            if size:
                sizes[-1].append(size)
    row = torch.tensor([tokens, positions], device=device)
    scored = torch.tensor([sources, targets], device=device)
    return Packed(row[0], row[1], sizes, sources=scored[0], targets=scored[1])
