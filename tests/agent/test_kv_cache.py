"""The KV cache's arena: allocation, eviction and copies of rows."""

import os
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.agent.kv_cache import MEMORY_SHARE, Allocation, Arena, CachedPrefix, Segment, affordable_rows
from tests import tiny

ROWS = 40


@cache
def small_arena() -> Arena:
    return Arena(tiny.policy(layers=1), ROWS)


def occupied(segments: list[Segment]) -> set[int]:
    return {row for segment in segments for row in range(segment.start, segment.start + segment.size)}


def first_free(size: int, segments: list[Segment]) -> int | None:
    """The first of the first `size` consecutive free rows, searched row by row."""
    taken = occupied(segments)
    starts = range(ROWS - size + 1)
    return next((start for start in starts if taken.isdisjoint(range(start, start + size))), None)


PLACES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 8), st.booleans()), max_size=7
)  # of each sequence: free rows before it, rows, and whether it is busy


@given(PLACES, st.randoms(use_true_random=False), st.integers(1, ROWS), st.booleans())
def test_the_fewest_idle_sequences_are_evicted_the_least_recently_used_first(places, rng, size, in_place):
    """Compared with a search row by row. Busy sequences are never evicted, the source of a copy last."""
    segments, busy, end = [], set(), 0
    for before, length, is_busy in places:
        segment = Segment(end + before, length, [])
        end = segment.end
        if end > ROWS:
            break
        segments.append(segment)
        if is_busy:
            busy.add(segment)
    for when, segment in enumerate(rng.sample(segments, len(segments))):
        segment.last_used = when
    idle = [segment for segment in segments if segment not in busy]
    candidates = idle if in_place else segments
    source = rng.choice(candidates) if candidates else None
    prefix = CachedPrefix(source, 1, in_place) if source is not None else None
    found = small_arena().allocate(size, segments, busy, prefix)

    kept = [segment for segment in segments if not (in_place and segment is source)]
    order = sorted((s for s in idle if s in kept), key=lambda segment: segment.last_used)
    if source in order:
        order = [*(segment for segment in order if segment is not source), source]
    for evicted in range(len(order) + 1):
        remaining = [segment for segment in kept if segment not in order[:evicted]]
        start = first_free(size, remaining)
        if start is not None:
            break
    if start is None:
        assert found is None
        return
    if source is not None and in_place and source.start + size <= ROWS:
        own = range(source.start, source.start + size)
        start = source.start if occupied(remaining).isdisjoint(own) else start
    assert found == Allocation(start, remaining)


def test_the_source_of_a_copy_is_evicted_last():
    """Even if it is the least recently used: the next game of its group needs it too."""
    source, other = Segment(0, 20, [1, 2], last_used=1), Segment(20, 20, [3], last_used=9)
    prefix = CachedPrefix(source, 2, in_place=False)
    assert small_arena().allocate(10, [source, other], set(), prefix) == Allocation(20, [source])
    assert small_arena().allocate(30, [source, other], set(), prefix) == Allocation(0, [])


@pytest.mark.parametrize(
    ("start", "size", "found"),
    [(28, 12, 28), (28, 13, 0), (14, 11, 14), (14, 12, 0)],  # up to the last row, and up to the neighbour
)
def test_a_sequence_that_is_extended_stays_in_place_if_it_can_grow_there(start, size, found):
    source, neighbour = Segment(start, 8, [1, 2]), Segment(25, 3, [3])
    segments = [source, neighbour] if start < 25 else [neighbour, source]
    prefix = CachedPrefix(source, 2, in_place=True)
    assert small_arena().allocate(size, segments, {neighbour}, prefix) == Allocation(found, [neighbour])


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [(0, 3, 20), (3, 0, 20), (10, 11, 29), (0, 10, 10), (10, 0, 10), (5, 5, 9), (0, 20, 0)],
)
def test_rows_are_copied_in_all_layers_even_if_the_ranges_overlap(source, target, count):
    arena = Arena(tiny.policy(layers=2), ROWS)
    caches = [*arena.keys, *arena.values]
    for number, rows in enumerate(caches):
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(number)))
    expected = [rows.clone() for rows in caches]
    for rows in expected:
        rows[:, target : target + count] = rows[:, source : source + count].clone()
    arena.copy(source, target, count)
    assert all(torch.equal(rows, wanted) for rows, wanted in zip(caches, expected, strict=True))


@pytest.mark.skipif(
    "SC_AVPHYS_PAGES" not in os.sysconf_names, reason="the system does not report free memory"
)
def test_by_default_the_cache_takes_its_share_of_the_free_memory():
    """The bytes of a row are measured on a real arena."""
    policy = tiny.policy()
    arena = Arena(policy, ROWS)
    row_bytes = sum(rows.nbytes for rows in (*arena.keys, *arena.values)) / (ROWS + 1)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Other programs may allocate or free memory at the same time.
    assert affordable_rows(policy) * row_bytes == pytest.approx(MEMORY_SHARE * free, rel=0.3)
