"""Sliding windows, and attention in packed rows, against a loop over queries; packed rows hold every game
without padding. test_model_types.py tests whole models.
"""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.model import attention
from prompt_r1.model.attention import attend_in_window, causal_mask, model_attention
from prompt_r1.model.packing import Packed, Segment, pack
from tests.support.games import CPU, siblings
from tests.support.naive_attention import naive_attention


@pytest.mark.parametrize("block", [5, 256])
@pytest.mark.parametrize("cached", [0, 9])
@pytest.mark.parametrize("window", [1, 5, 100, None])
def test_attention_in_a_window_equals_a_loop_over_queries(window, cached, block, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, length, 8, dtype=torch.float64, generator=generator)
        for heads, length in ((4, 13), (2, cached + 13), (2, cached + 13))
    )
    found = attend_in_window(query, key, value, 0.4, window, causal_mask)
    torch.testing.assert_close(found, naive_attention(query, key, value, 0.4, window))


def test_a_model_that_gives_no_scale_gets_that_of_the_head_dimension():
    rows, scales = torch.ones(1, 4, 7, 16), []  # (1, H, T, D)

    def noted(layer, query, key, value, scale, window):
        scales.append(scale)
        return value

    model_attention(SimpleNamespace(layer_idx=0), rows, rows, rows, None, row_attention=noted)
    assert scales == [16**-0.5]


some_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=4).map(
    lambda shapes: [siblings(seed, count) for seed, count in shapes]
)


@given(some_groups)
def test_a_row_holds_each_opening_once_and_every_token_of_each_game(groups):
    row = pack(groups, CPU)
    own = sum(len(game.tokens) - 1 - game.opening_length for group in groups for game in group)
    assert len(row.tokens) == sum(group[0].opening_length for group in groups) + own
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
    assert found == expected  # (token, token before it, position of the token before it)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 9, 33])
def test_attention_in_a_row_equals_a_loop_over_the_queries_of_each_game(kv_heads, window):
    groups = [[7, 40, 3, 9], [25, 0], [1, 1, 30]]
    torch.manual_seed(0)
    rows = [torch.randn(heads, 116, 16, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]
    none = torch.empty(0)
    segments = []
    for opening, first, *others in groups:
        segments.append(Segment(opening + first, opening))
        segments += [Segment(length, None) for length in others]
    row = Packed(none, none, segments, sources=none, targets=none)
    found = row.row_attention()(0, *rows, 0.3, window)
    columns = iter(range(116))
    for opening_size, *games in groups:
        opening = [*islice(columns, opening_size)]
        for size in games:
            game = [*opening, *islice(columns, size)]
            expected = naive_attention(*(row[:, game] for row in rows), 0.3, window)
            torch.testing.assert_close(found[game].transpose(0, 1), expected)


def test_masked_queries_on_a_cpu_are_computed_in_blocks_that_see_no_later_keys(monkeypatch):
    """SDPA on a CPU also computes the scores that a mask hides: of a long prompt, twice as many."""
    monkeypatch.setattr(attention, "BLOCK", 5)
    shapes: list[tuple[int, int]] = []

    def noted_mask(count: int, length: int, *rest) -> torch.Tensor:
        shapes.append((count, length))
        return attention.causal_mask(count, length, *rest)

    query, key, value = torch.randn(2, 13, 8), torch.randn(2, 22, 8), torch.randn(2, 22, 8)
    attend_in_window(query, key, value, 0.4, None, noted_mask)
    assert shapes == [(5, 14), (5, 19), (3, 22)]
