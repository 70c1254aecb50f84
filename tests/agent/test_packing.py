"""Packed rows hold every game without padding, and attention in them equals attention game by game."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.agent.packing import CausalBlocks, Group, game_by_game, merged, pack, varlen
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_merged_attention_and_its_gradients_equal_those_game_by_game(dtype, kv_heads):
    groups = columns_of((7, (40, 3, 90)), (25, ()), (1, (1, 70)))
    torch.manual_seed(0)
    rows = [torch.randn(heads, 237, 16, dtype=dtype) for heads in (4, kv_heads, kv_heads, 4)]
    results = []
    for attention in (merged, game_by_game):
        leaves = [tensor.clone().requires_grad_() for tensor in rows[:3]]
        out = attention(groups, *leaves, 0.3)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, rows[3])])
    for found, expected in zip(*results, strict=True):
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.usefixtures("varlen")
def test_varlen_attention_equals_attention_game_by_game(kv_heads):
    groups = columns_of((7, (40, 3, 9)), (25, ()), (1, (1, 30)))
    torch.manual_seed(0)
    rows = [torch.randn(heads, 116, 16) for heads in (4, kv_heads, kv_heads)]
    blocks = CausalBlocks.of(groups, CPU)
    assert (blocks.longest_query, blocks.longest_key) == (40, 47)
    for window in (None, 6):
        expected = game_by_game(groups, *rows, 0.3, window)
        assert torch.allclose(varlen(blocks, *rows, 0.3, window), expected, atol=1e-5)


@pytest.mark.parametrize("window", [9, 33, 45])
def test_merged_attention_sees_the_window_of_every_group(window):
    """The first group is shorter than the window; a game may exceed it only with its opening."""
    groups = columns_of((4, (3, 2)), (30, (8, 6)), (10, (7,)))
    torch.manual_seed(0)
    rows = [torch.randn(heads, 70, 16) for heads in (4, 2, 2)]
    torch.testing.assert_close(merged(groups, *rows, 0.3, window), game_by_game(groups, *rows, 0.3, window))
