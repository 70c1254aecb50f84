"""The arena of the KV cache: where a sequence gets its rows, what is dropped for it, how rows are copied."""

import os
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.agent.kv_cache import SHARE, Arena, Segment, affordable_rows
from tests import tiny

ROWS = 40


@cache
def small_arena() -> Arena:
    return Arena(tiny.policy(layers=1), ROWS)


def occupied(segments: list[Segment]) -> set[int]:
    return {row for segment in segments for row in range(segment.start, segment.start + segment.size)}


def first_free(size: int, segments: list[Segment]) -> int | None:
    """The first of `size` consecutive free rows, found row by row."""
    taken = occupied(segments)
    starts = range(ROWS - size + 1)
    return next((start for start in starts if taken.isdisjoint(range(start, start + size))), None)


PLACES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 8), st.booleans()), max_size=7
)  # of each sequence: free rows before it, rows, and whether it runs


@given(PLACES, st.randoms(use_true_random=False), st.integers(1, ROWS), st.booleans())
def test_room_is_made_by_dropping_the_fewest_idle_sequences_the_longest_unused_first(
    places, rng, size, moves
):
    """Against a search row by row. What runs is never dropped, and what is about to be copied goes last."""
    segments, busy, end = [], set(), 0
    for before, length, runs in places:
        segment = Segment(end + before, length, [])
        end = segment.start + length
        if end > ROWS:
            break
        segments.append(segment)
        if runs:
            busy.add(segment)
    for when, segment in enumerate(rng.sample(segments, len(segments))):
        segment.last_used = when
    idle = [segment for segment in segments if segment not in busy]
    source = rng.choice(idle if moves else segments) if (idle if moves else segments) else None
    found = small_arena().make_room(size, segments, busy, source, moves=moves)

    kept = [segment for segment in segments if not (moves and segment is source)]
    order = sorted((s for s in idle if s in kept), key=lambda segment: segment.last_used)
    if source in order:
        order = [*(segment for segment in order if segment is not source), source]
    for dropped in range(len(order) + 1):
        stay = [segment for segment in kept if segment not in order[:dropped]]
        start = first_free(size, stay)
        if start is not None:
            break
    if start is None:
        assert found is None
        return
    if source is not None and moves and source.start + size <= ROWS:
        own = range(source.start, source.start + size)
        start = source.start if occupied(stay).isdisjoint(own) else start
    assert found == (start, stay)


def test_what_is_about_to_be_copied_is_dropped_last():
    """However long it has not been used: the next game of its group wants it too."""
    source, other = Segment(0, 20, [1, 2], last_used=1), Segment(20, 20, [3], last_used=9)
    assert small_arena().make_room(10, [source, other], set(), source, moves=False) == (20, [source])
    assert small_arena().make_room(30, [source, other], set(), source, moves=False) == (0, [])


@pytest.mark.parametrize(
    ("start", "size", "found"),
    [(28, 12, 28), (28, 13, 0), (14, 11, 14), (14, 12, 0)],  # up to the last row, and up to the neighbour
)
def test_a_sequence_that_is_continued_stays_where_it_is_if_it_can_grow_there(start, size, found):
    source, neighbour = Segment(start, 8, [1, 2]), Segment(25, 3, [3])
    segments = [source, neighbour] if start < 25 else [neighbour, source]
    assert small_arena().make_room(size, segments, {neighbour}, source, moves=True) == (found, [neighbour])


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [(0, 3, 20), (3, 0, 20), (10, 11, 29), (0, 10, 10), (10, 0, 10), (5, 5, 9), (0, 20, 0)],
)
def test_rows_are_copied_in_all_layers_even_where_the_two_places_overlap(source, target, count):
    arena = Arena(tiny.policy(layers=2), ROWS)
    caches = [*arena.keys, *arena.values]
    for number, rows in enumerate(caches):
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(number)))
    expected = [rows.clone() for rows in caches]
    for rows in expected:
        rows[:, target : target + count] = rows[:, source : source + count].clone()
    arena.copy(source, target, count)
    assert all(torch.equal(rows, wanted) for rows, wanted in zip(caches, expected, strict=True))


@pytest.mark.skipif("SC_AVPHYS_PAGES" not in os.sysconf_names, reason="free memory is not known here")
def test_without_a_number_the_cache_takes_its_share_of_the_free_memory():
    """Keys and values of all layers, weighed on a real arena."""
    policy = tiny.policy()
    arena = Arena(policy, ROWS)
    weight = sum(rows.nbytes for rows in (*arena.keys, *arena.values)) / (ROWS + 1)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Other programs may take and free memory at this moment.
    assert affordable_rows(policy) * weight == pytest.approx(SHARE * free, rel=0.3)
