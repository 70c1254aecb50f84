"""Pack games into one row without padding.

    tokens      [opening | game 1 | game 2 | … ][opening | game 1 | … ]      one row of T tokens
                 \\__________ group __________/

Each token attends to the opening of its group and to the earlier tokens of its own game. The last token of a
game is only a target, so it is not in the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

import torch
from torch import Tensor

from prompt_r1.model.attention import Mask, RowAttention, Window, attend_in_window, causal_mask
from prompt_r1.types import Trajectory


@dataclass(frozen=True)
class Packed:
    """A row of T tokens, and its N scored tokens: the agent's own, in the order of the games."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) of each token in its game
    sizes: Sequence[Sequence[int]]  # of each group: tokens of its opening, then those that each game adds
    sources: Tensor  # (N,) columns whose next-token distributions are scored
    targets: Tensor  # (N,) int64 the tokens that followed

    @property
    def attend(self) -> RowAttention:
        """Attention of one forward: its layers share their masks, which are freed with its graph."""
        return partial(self._attend, cache(causal_mask))

    def _attend(
        self, mask: Mask, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Attend to the keys of each game, which are copied behind its opening's. Shapes: `RowAttention`."""
        # Query and key norms computed in float32 return float32: back to the compute dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        # Split once: the gradient of a slice is as large as the row.
        sizes = [size for _, *games in self.sizes for size in games]
        parts = zip(query.split(sizes, 1), key.split(sizes, 1), value.split(sizes, 1), strict=True)
        out: list[Tensor] = []
        for opening, *games in self.sizes:
            keys, values = key.detach()[:, :0], value.detach()[:, :0]  # the first game brings the opening
            for queries, own_keys, own_values in islice(parts, len(games)):
                keys = torch.cat([keys[:, :opening], own_keys], 1)
                values = torch.cat([values[:, :opening], own_values], 1)
                out.append(attend_in_window(queries, keys, values, scale, window, mask))
        # Most kernels of SDPA write (T, H, D), so nothing is copied twice.
        return torch.cat([part.transpose(0, 1) for part in out])


def pack(groups: Sequence[Sequence[Trajectory]], device: torch.device) -> Packed:
    """Pack groups of games into one row. The games of a group must have the same opening."""
    tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    sizes: list[list[int]] = []
    for games in groups:
        shared: list[int] = []  # columns of the opening, once the first game is in the row
        sizes.append([games[0].opening_length])
        for game in games:
            assert game.tokens[: game.opening_length] == games[0].tokens[: games[0].opening_length]
            begin, end = len(shared), len(game.tokens) - 1
            columns = [*shared, *range(len(tokens), len(tokens) + end - begin)]
            own = [position for position, sampled in enumerate(game.sampled) if sampled]
            sources += [columns[position - 1] for position in own]  # the token before predicts it
            targets += [game.tokens[position] for position in own]
            tokens += game.tokens[begin:end]
            positions += range(begin, end)
            if begin < end:
                sizes[-1].append(end - begin)
            shared = columns[: game.opening_length]
    row, scored = (torch.tensor(pair, device=device) for pair in ([tokens, positions], [sources, targets]))
    return Packed(row[0], row[1], sizes, sources=scored[0], targets=scored[1])
