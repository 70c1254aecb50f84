r"""Pack games into one row without padding.

    tokens      [opening | game 1 | game 2 | … ][opening | game 1 | … ]      one row of T tokens
                 \__________ group __________/

A group has games with the same opening. Each token attends to the opening of its group, and to the earlier
tokens of its own game. The last token of a game is only a target, so it is not in the row. The *place* of a
token is its index in the row, and its *position* is its index in the game.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from prompt_r1.model.attention import Mask, RowAttention, Window, attend_in_window, causal_mask
from prompt_r1.types import Trajectory


@dataclass(frozen=True)
class Segment:
    """The tokens that one game adds to a row. A game that adds none has no segment."""

    length: int
    # The length of the opening, with which the first segment of a group begins. None in the other segments of
    # the group, whose games read the opening in the first one.
    opening_length: int | None


@dataclass(frozen=True)
class Packed:
    """A row of T tokens, and its N scored tokens: the agent's own, in the order of the games."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) the position of each token in its game
    segments: Sequence[Segment]
    sources: Tensor  # (N,) the places whose next-token distributions are scored
    targets: Tensor  # (N,) int64, the scored tokens: each follows the token in its source

    def row_attention(self) -> RowAttention:
        """Make the attention of one forward, whose layers share their masks."""
        mask = cache(causal_mask)  # A new cache for each forward. It is freed with the forward's graph.
        return partial(self._attend, mask)

    def _attend(
        self, mask: Mask, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Let each game attend to its opening and to itself. Shapes: `RowAttention`."""
        # Norms may turn queries and keys into float32. SDPA needs one dtype: the dtype of the values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        # Split once: the backward of each single slice would allocate zeros for the whole row.
        lengths = [segment.length for segment in self.segments]
        parts = zip(query.split(lengths, 1), key.split(lengths, 1), value.split(lengths, 1), strict=True)
        out: list[Tensor] = []
        for segment, (queries, keys, values) in zip(self.segments, parts, strict=True):
            if segment.opening_length is not None:
                opening_keys = keys[:, : segment.opening_length]
                opening_values = values[:, : segment.opening_length]
            else:  # Copy the opening in front of the game's own tokens.
                keys = torch.cat([opening_keys, keys], 1)
                values = torch.cat([opening_values, values], 1)
            out.append(attend_in_window(queries, keys, values, scale, window, mask))
        # SDPA returns (H, T, D), but most of its kernels store the result as (T, H, D). So the transposed
        # parts are contiguous, and only `cat` copies.
        return torch.cat([part.transpose(0, 1) for part in out])


def pack(groups: Sequence[Sequence[Trajectory]], device: torch.device) -> Packed:
    """Pack groups of games into one row. The games of a group must have the same opening.

    Without games the row has one token, which is not scored.
    """
    tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    segments: list[Segment] = []
    for games in groups:
        opening_length = games[0].opening_length
        group_start = len(tokens)  # the place of the group's first token
        for number, game in enumerate(games):
            opening = game.tokens[: game.opening_length]
            assert opening == games[0].tokens[:opening_length], "the games of a group share their opening"
            # The positions of the tokens that the game adds to the row. Only the first game of a group adds
            # the opening. No game adds its last token, which is only a target.
            added = range(0 if number == 0 else opening_length, len(game.tokens) - 1)
            # places[t] is the place of the game's token t. For example, a group begins in place 0, with an
            # opening of 4 tokens, and its second game begins in place 10. Then the second game has the places
            # 0, 1, 2, 3, 10, 11, …
            opening_places = range(group_start, group_start + added.start)
            added_places = range(len(tokens), len(tokens) + len(added))
            places = [*opening_places, *added_places]
            for position, sampled in enumerate(game.sampled):
                if sampled:
                    sources.append(places[position - 1])  # The token before predicts the sampled token.
                    targets.append(game.tokens[position])
            tokens += game.tokens[added.start : added.stop]
            positions += added
            # A later game with a single token after the opening adds nothing: this token is only a target.
            if added:
                segments.append(Segment(len(added), opening_length if number == 0 else None))
    if not groups:
        tokens, positions, segments = [0], [0], [Segment(1, opening_length=0)]
    return Packed(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        segments,
        sources=torch.tensor(sources, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
    )
