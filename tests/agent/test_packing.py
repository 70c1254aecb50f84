"""Packed rows hold every game without padding, and attention in them equals attention game by game."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.agent.packing import Group, Packed, pack
from tests.agent.test_attention import naive_attention
from tests.support.games import CPU, siblings

some_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=4).map(
    lambda shapes: [siblings(seed, count) for seed, count in shapes]
)


def columns_of(*groups: tuple[int, tuple[int, ...]]) -> tuple[Group, ...]:
    """Groups in a row, of the lengths of their opening and of what each game has after it."""
    ends = [0, *accumulate(length for opening, games in groups for length in (opening, *games))]
    columns = iter([slice(*pair) for pair in pairwise(ends)])
    return tuple(Group(next(columns), tuple(next(columns) for _ in games)) for _, games in groups)


@given(some_groups)
def test_a_row_holds_each_opening_once_and_every_token_of_each_game(groups):
    row = pack(groups, CPU)
    own = sum(len(game.tokens) - 1 - game.opening for group in groups for game in group)
    assert len(row.tokens) == sum(group[0].opening for group in groups) + own
    expected = [
        (token, game.tokens[t - 1], t - 1)
        for group in groups
        for game in group
        for t, token in enumerate(game.tokens)
        if game.sampled[t]
    ]
    sources = row.sources
    previous, positions = row.tokens[sources].tolist(), row.positions[sources].tolist()
    found = list(zip(row.targets.tolist(), previous, positions, strict=True))
    assert found == expected  # the token, the token before it, and the position of that one in its game


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 9, 33])
def test_attention_in_a_row_equals_a_loop_over_the_queries_of_each_game(kv_heads, window):
    groups = columns_of((7, (40, 3, 9)), (25, ()), (1, (1, 30)))
    torch.manual_seed(0)
    rows = [torch.randn(heads, 116, 16, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]
    found = Packed(*[torch.empty(0)] * 2, groups, *[torch.empty(0)] * 2).attend(*rows, 0.3, window)
    for group in groups:
        for own in group.games or (slice(0, 0),):
            game = [*range(group.opening.start, group.opening.stop), *range(own.start, own.stop)]
            expected = naive_attention(*(row[:, game] for row in rows), 0.3, window)
            torch.testing.assert_close(found[:, game], expected)
