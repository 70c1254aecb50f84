"""The KV cache's arena: allocation, eviction and copies of rows."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.agent.kv_cache import (
    MEMORY_SHARE,
    Arena,
    Game,
    Move,
    PrefixIndex,
    Segment,
    affordable_rows,
    free_memory,
    prefix_key,
)
from tests.support import tiny

ROWS = 40


SIZES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=40)


@given(SIZES)
def test_sequences_keep_their_rows_whichever_of_them_grow_shrink_and_move(requests):
    """Each request gives one of seven sequences another size; 0 removes it. Every row holds a number that
    says whose it is.
    """
    arena = Arena(tiny.policy(layers=1), ROWS)
    segments: dict[int, Segment] = {}
    for name, size in requests:
        segment = segments.get(name)
        if segment is not None and size == 0:
            arena.remove(segments.pop(name))
        elif size and size - (segment.size if segment else 0) <= arena.free:
            if segment is None:
                segment = segments[name] = Segment(Game())
            segment.truncate(size)
            arena.resize(segment, size)
            for row in range(len(segment.tokens), size):
                segment.tokens.append(100 * name + row)
                arena.keys[0][:, segment.start + row] = 100 * name + row
        assert arena.free == ROWS - sum(segment.size for segment in segments.values())
        assert arena.segments == sorted(segments.values(), key=lambda segment: segment.start)
        ends = [0, *(segment.end for segment in arena.segments)]
        starts = [*(segment.start for segment in arena.segments), ROWS]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))
        for segment in arena.segments:
            rows = arena.keys[0][0, segment.start : segment.end, 0]
            assert rows.tolist() == segment.tokens


def place(arena: Arena, *sizes: int) -> list[Segment]:
    """Sequences one after the other, with all of their rows in use."""
    segments = [Segment(Game(), tokens=[0] * size) for size in sizes]
    for segment in segments:
        arena.resize(segment, len(segment.tokens))
    arena.copied = 0
    return segments


def test_as_few_rows_as_possible_move_to_make_a_gap():
    """Free rows: 5 after the 10, 5 after the 3, 4 at the end. A gap of 10 needs only the 3 rows to move."""
    arena = Arena(tiny.policy(layers=1), ROWS)
    first, gap, small, other, last = place(arena, 10, 5, 3, 5, 13)
    arena.remove(gap)
    arena.remove(other)
    new = Segment(Game())
    arena.resize(new, 10)
    assert [first.start, small.start, new.start, last.start] == [0, 10, 13, 23]
    assert arena.copied == 3


def test_a_sequence_grows_where_it_is_if_the_next_rows_are_free():
    arena = Arena(tiny.policy(layers=1), ROWS)
    first, gap, last = place(arena, 10, 6, 20)
    arena.remove(gap)
    arena.resize(first, 16)
    assert first.start == 0 and arena.copied == 0
    arena.resize(last, 24)
    assert last.start == 16 and arena.copied == 0


BITS = st.lists(st.integers(0, 1), max_size=12)


@given(BITS.filter(bool), st.lists(BITS.filter(bool), max_size=12), st.data())
def test_no_sequence_shares_more_of_a_prompt_than_the_one_that_is_found(prompt, sequences, data):
    index = PrefixIndex()
    segments = [Segment(Game(), tokens=tokens) for tokens in sequences]
    for segment in segments:
        index.add(prefix_key(segment.tokens), segment)
    removed = data.draw(st.sets(st.integers(0, 11)))
    for number in removed & set(range(len(segments))):
        index.remove(segments[number])
    left = [segment for number, segment in enumerate(segments) if number not in removed]

    def shared(tokens: list[int]) -> int:
        pairs = zip(tokens, prompt, strict=False)
        return next(
            (n for n, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(prompt))
        )

    best = max((shared(segment.tokens) for segment in left), default=0)
    found = index.find(prefix_key(prompt))
    assert (found.shared if found is not None else 0) == best
    assert found is None or (found.segment in left and shared(found.segment.tokens) == best)


class CountedKey(bytes):
    """Counts how often keys are compared."""

    comparisons = 0

    def __lt__(self, other: bytes) -> bool:
        CountedKey.comparisons += 1
        return bytes(self) < bytes(other)

    def __eq__(self, other: object) -> bool:
        CountedKey.comparisons += 1
        return isinstance(other, bytes) and bytes(self) == bytes(other)

    __hash__ = bytes.__hash__


def test_a_common_instruction_does_not_make_the_search_compare_every_sequence():
    index = PrefixIndex()
    instruction = [*range(400)]
    for number in range(640):
        tokens = [*instruction, 1000 + 7 * number % 640]
        index.add(CountedKey(prefix_key(tokens)), Segment(Game(), tokens=tokens))
    CountedKey.comparisons = 0
    found = index.find(CountedKey(prefix_key([*instruction, 1320, 5])))
    assert found is not None and found.shared == 401
    assert 0 < CountedKey.comparisons <= 2 * 11


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
    arena.copy([Move(source, target, count)])
    assert all(torch.equal(rows, wanted) for rows, wanted in zip(caches, expected, strict=True))


def test_by_default_the_cache_takes_its_share_of_the_free_memory(monkeypatch):
    """The bytes of a row are measured on a real arena."""
    policy = tiny.policy()
    arena = Arena(policy, ROWS)
    row_bytes = sum(rows.nbytes for rows in (*arena.keys, *arena.values)) / (ROWS + 1)
    monkeypatch.setattr("prompt_r1.agent.kv_cache.free_memory", lambda: 10**9)
    assert affordable_rows(policy) * row_bytes == pytest.approx(MEMORY_SHARE * 10**9, rel=1e-4)


GB = 10**9
STAT = f"anon {3 * GB}\nactive_file {GB}\ninactive_file {2 * GB}"


def group_v2(limit: object, used: float) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": int(used * GB), "memory.stat": STAT}


@pytest.mark.parametrize(
    ("membership", "groups", "gigabytes"),
    [
        ("0::/\n", {}, 20.48),  # no limit: MemAvailable, not MemFree
        ("0::/\n", {"": group_v2("max", 15)}, 20.48),
        ("0::/\n", {"": group_v2(16 * GB, 6)}, 13),  # of the 6 GB used, 3 are page cache
        ("0::/\n", {"": group_v2(4 * GB, 8)}, 0),
        ("0::/a/b\n", {"a": group_v2(8 * GB, 4), "a/b": group_v2("max", 4)}, 7),  # the limit of a parent
        ("0::/a/b\n", {"a": group_v2(8 * GB, 4), "a/b": group_v2(6 * GB, 4)}, 5),
        ("9:cpu:/x\n0::/a/b\n", {"a/b": group_v2(6 * GB, 4)}, 5),
    ],
)
def test_free_memory_is_what_the_machine_and_the_cgroups_leave(tmp_path, membership, groups, gigabytes):
    """Fake files as Linux writes them; SC_AVPHYS_PAGES knew neither page cache nor containers."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 32000000 kB\nMemFree: 100 kB\nMemAvailable: 20000000 kB\n")
    (proc / "self/cgroup").write_text(membership)
    for name, files in groups.items():
        (cgroups / name).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (cgroups / name / file).write_text(f"{content}\n")
    assert free_memory(proc, cgroups) == pytest.approx(gigabytes * GB)


def test_without_linuxs_files_all_memory_counts_as_free(tmp_path):
    assert free_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory() <= free_memory(tmp_path)
