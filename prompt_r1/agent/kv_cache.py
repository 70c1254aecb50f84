"""The KV cache, with one row per token.

The games of a group begin with the same prompt. On GPUs its rows are shared: the first game that computed the
prompt leaves these rows to a parent, and the sequence of each game has rows for what comes after it. Five
games of 600 + 630 tokens then take 3,750 rows instead of 6,150.
"""

import os
import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from prompt_r1.agent.attention import attention_shape
from prompt_r1.agent.policy import Policy
from prompt_r1.errors import UsageError

# Share of the free memory that the arena takes if no size is given.
MEMORY_SHARE = 0.3
# What CUDA, NCCL, graphs and holes in the allocator take beside what is counted (a guess, not measured).
UNCOUNTED_BYTES = 2e9


@dataclass(eq=False)
class Game:
    """Whose sequences these are: the calls of one asyncio task."""

    number: int = 0  # in the order of their first calls
    over: bool = False
    segment: "Segment | None" = None  # the sequence that its next turn will probably continue

    def leave(self, segment: "Segment") -> None:
        """Do not expect the game to continue this sequence."""
        if self.segment is segment:
            self.segment = None


@dataclass(eq=False)
class Segment:
    """The rows of one sequence: its cached tokens, and space for more.

    A sequence with a parent has its first tokens in the rows of that segment. A parent belongs to no game,
    does not grow, and stays at least as long as its children.
    """

    game: Game
    start: int = 0  # first row
    size: int = 0  # rows
    tokens: list[int] = field(default_factory=list)  # those cached, the parent's included
    parent: "Segment | None" = None
    is_parent: bool = False
    children: set["Segment"] = field(default_factory=set, repr=False)
    # The last hidden state (hidden,) of each prompt that ended in this sequence, by the prompt's length. The
    # next game with the same prompt samples from it without a forward.
    end_states: dict[int, Tensor] = field(default_factory=dict)
    busy: bool = False  # a running job extends it
    last_used: int = 0  # step number

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def shared(self) -> int:
        """Tokens in the rows of the parent."""
        return len(self.parent.tokens) if self.parent is not None else 0

    @property
    def capacity(self) -> int:
        """The number of tokens for which it has rows."""
        return self.shared + self.size

    @property
    def is_idle(self) -> bool:
        """Whether neither a running job nor another sequence needs its rows now."""
        return not self.busy and not self.children

    @property
    def is_abandoned(self) -> bool:
        """Whether no game is expected to continue it."""
        return self.is_idle and (self.game.over or self.game.segment is not self)

    def ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Where its tokens [first, last) lie: first rows, and numbers of rows."""
        ranges = []
        if self.parent is not None and first < self.shared:
            ranges.append((self.parent.start + first, min(last, self.shared) - first))
        if last > self.shared:
            begin = max(first, self.shared)
            ranges.append((self.start + begin - self.shared, last - begin))
        return ranges

    def truncate(self, length: int) -> None:
        """Drop all but the first tokens."""
        del self.tokens[length:]
        self.end_states = self.end_states_up_to(length)

    def end_states_up_to(self, length: int) -> dict[int, Tensor]:
        """The end states of the prompts among its first tokens."""
        return {end: state for end, state in self.end_states.items() if end <= length}


@dataclass(frozen=True)
class Prefix:
    """A sequence that begins like a prompt."""

    segment: Segment
    shared: int  # first tokens that both have; those of a running job may not be computed yet

    @property
    def is_coming(self) -> bool:
        """Whether a running job is still computing it."""
        return self.segment.busy and len(self.segment.tokens) < self.shared

    def usable_by(self, prompt: list[int]) -> int:
        """How many first tokens of the prompt need no forward.

        Sampling begins with the hidden state of the prompt's last token, so that token must be computed
        unless its state is stored.
        """
        cached = min(self.shared, len(self.segment.tokens))
        return cached - 1 if cached == len(prompt) and cached not in self.segment.end_states else cached


class PrefixIndex:
    """Finds the sequence that shares the longest prefix with a prompt.

    The sequences are sorted by their tokens. Wherever a prompt would be inserted, no sequence shares more of
    it than one of the two neighbours. So a search takes log2(sequences) comparisons of bytes, even if all of
    them begin alike.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[bytes, int, Segment]] = []  # the number makes entries unique
        self._entries: dict[Segment, tuple[bytes, int, Segment]] = {}

    def add(self, key: bytes, segment: Segment) -> None:
        """Add a sequence, or replace its key."""
        self.remove(segment)
        self._entries[segment] = entry = (key, id(segment), segment)
        insort(self._sorted, entry)

    def remove(self, segment: Segment) -> None:
        """Remove a sequence if it is here."""
        entry = self._entries.pop(segment, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, entry)]

    def find(self, key: bytes) -> Prefix | None:
        """The sequence that shares most tokens with a prompt; None if no sequence begins like it."""
        place = bisect_left(self._sorted, (key,))
        best: Prefix | None = None
        for other, _, segment in self._sorted[max(place - 1, 0) : place + 1]:
            shared = common_prefix_length(key, other) // array("i").itemsize
            if shared > (best.shared if best is not None else 0):
                best = Prefix(segment, shared)
        return best


def prefix_key(tokens: list[int]) -> bytes:
    """Tokens in a form that is compared quickly."""
    return array("i", tokens).tobytes()


@dataclass(frozen=True)
class Move:
    """A range of rows to copy."""

    source: int  # first row
    target: int  # first row
    count: int


class Arena:
    """Keys and values of all layers for `rows` tokens, in the compute dtype, on the policy's device.

    One additional row, `spare`, belongs to no sequence: idle rows of a batch are written to it.
    """

    def __init__(self, policy: Policy, rows: int) -> None:
        shape = attention_shape(policy.model.config)
        # Heads first, so that a head's rows of one sequence are contiguous: the fastest layout on a CPU.
        size = (shape.kv_heads, rows + 1, shape.dim)
        dtype, device = policy.compute, policy.device
        self.keys = [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.values = [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.rows = rows
        self.spare = rows
        self.free = rows  # rows that belong to no segment
        self.segments: list[Segment] = []  # in the order of their rows
        self.copied = 0  # rows, for tests and reports

    def resize(self, segment: Segment, capacity: int) -> None:
        """Give a segment, which may be a new one, rows for so many tokens: where it is, or in another gap.

        If no gap is large enough, the fewest rows are moved that make one. There must be as many free rows as
        the segment grows by.
        """
        size = capacity - segment.shared
        assert size - segment.size <= self.free, f"{size - segment.size} more rows, {self.free} free"
        self.free -= size - segment.size
        if segment.size:
            place = self._place_of(segment)
            following = self.segments[place + 1 : place + 2]
            if segment.start + size <= (following[0].start if following else self.rows):
                segment.size = size
                return
            del self.segments[place]
        first, last = self._segments_to_move(size)
        end = self.segments[first - 1].end if first else 0
        starts: dict[Segment, int] = {}
        for moved in self.segments[first:last]:
            starts[moved] = end
            end += moved.size
        starts[segment] = end
        self._move(starts)
        segment.size = size
        self.segments.insert(last, segment)
        if segment.parent is not None:
            segment.parent.children.add(segment)

    def remove(self, segment: Segment) -> None:
        """Free the rows of a segment."""
        assert not segment.children, "the parent of other sequences"
        del self.segments[self._place_of(segment)]
        self.free += segment.size
        if segment.parent is not None:
            segment.parent.children.remove(segment)

    def split_parent(self, segment: Segment, length: int) -> Segment:
        """Let a sequence leave the rows of its first tokens to a parent. No row is copied."""
        assert segment.parent is None and length < segment.size
        parent = Segment(
            Game(),
            start=segment.start,
            size=length,
            tokens=segment.tokens[:length],
            is_parent=True,
            children={segment},
            end_states=segment.end_states_up_to(length),
        )
        self.segments.insert(self._place_of(segment), parent)
        segment.parent = parent
        segment.start += length
        segment.size -= length
        return parent

    def copy_prefix(self, source: Segment, target: Segment, length: int) -> None:
        """Copy the first tokens of a sequence to a new one, except those in the parent of the new one."""
        moves = []
        row = target.start
        for start, count in source.ranges(target.shared, length):
            moves.append(Move(start, row, count))
            row += count
        self.copy(moves)
        target.tokens = source.tokens[:length]
        target.end_states = source.end_states_up_to(length)

    def _place_of(self, segment: Segment) -> int:
        return bisect_left(self.segments, segment.start, key=attrgetter("start"))

    def _segments_to_move(self, size: int) -> tuple[int, int]:
        """The consecutive segments, as a range of indices, that have the fewest rows among those with `size`
        free rows between them and beside them. No segment, if a gap is large enough.
        """
        best, fewest = (0, len(self.segments)), self.rows + 1
        ends = [0, *(segment.end for segment in self.segments)]
        starts = [*(segment.start for segment in self.segments), self.rows]
        last = occupied = 0  # of the range that begins at `first`
        for first, begin in enumerate(ends):
            while starts[last] - begin - occupied < size:
                if last == len(self.segments):
                    return best
                occupied += self.segments[last].size
                last += 1
            if occupied < fewest:
                best, fewest = (first, last), occupied
            if first == last:
                return best
            occupied -= self.segments[first].size
        return best

    def _move(self, starts: dict[Segment, int]) -> None:
        """Move sequences to their new first rows."""
        used = {segment: len(segment.tokens) - segment.shared for segment in starts}
        self.copy([Move(segment.start, start, used[segment]) for segment, start in starts.items()])
        for segment, start in starts.items():
            segment.start = start

    def copy(self, moves: Iterable[Move]) -> None:
        """Copy ranges of rows. They may overlap: all of a layer's rows are read before any is written."""
        moves = [move for move in moves if move.count and move.source != move.target]
        if not moves:
            return
        device = self.keys[0].device
        sources = torch.cat([torch.arange(move.count, device=device) + move.source for move in moves])
        targets = torch.cat([torch.arange(move.count, device=device) + move.target for move in moves])
        for cache in (*self.keys, *self.values):
            cache.index_copy_(1, targets, cache.index_select(1, sources))
        self.copied += len(sources)


def cache_bytes(free: float, later: float, least: float) -> float:
    """How much of the free memory caches take: MEMORY_SHARE, and no more than what comes later leaves.

    They leave UNCOUNTED_BYTES too, where that still allows them the `least` that they need.
    """
    if not later:
        return MEMORY_SHARE * free
    room = free - later
    return min(MEMORY_SHARE * free, max(room - UNCOUNTED_BYTES, min(room, least)))


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of main memory that this process may still take; without Linux's files, all that there is.

    MemAvailable (proc(5)), or less if a cgroup of the process has less left (cgroup-v2.rst of the kernel).
    Both count the page cache of files as free.
    """
    try:
        free = 1024 * int((proc / "meminfo").read_text().split("MemAvailable:")[1].split()[0])
        memberships = (proc / "self/cgroup").read_text().splitlines()
    except (OSError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    path = next((line.removeprefix("0::/") for line in memberships if line.startswith("0::")), "")
    group = cgroups / path
    while group.is_relative_to(cgroups):
        free = min(free, _left_in(group))
        group = group.parent
    return max(free, 0)


def _left_in(group: Path) -> int:
    """The bytes that a cgroup may still take; sys.maxsize if it has no limit."""
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or the limit "max"
        return sys.maxsize
    return most - used + sum(int(counts.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))


def free_on(device: torch.device) -> int:
    """The bytes that this process can still allocate on a device."""
    if device.type != "cuda":
        return free_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def affordable_rows(policy: Policy, later: float = 0.0, least: int = 0) -> int:
    """The number of rows that caches may have; 0 if what comes later needs all memory that is free now.

    `later`: bytes that will be allocated on the device after the caches. `least`: rows that they need.
    """
    free = free_on(policy.device)
    row_bytes = attention_shape(policy.model.config).cache_entries * policy.compute.itemsize
    return max(0, int(cache_bytes(free, later, least * row_bytes)) // row_bytes)


def allocate_arena(policy: Policy, *, rows: int, least: int, most: int, later: float) -> Arena:
    """An arena of so many rows (0: as many as free memory allows, at most `most`).

    `least`: tokens of a game. `later`: bytes that will be allocated after it. Raises UsageError if the
    memory does not hold one game.
    """
    affordable = affordable_rows(policy, later, least)
    rows = rows or min(affordable, most)
    if rows < least and later:
        raise UsageError(
            f"training will take {later / 1e9:.1f} GB more of this device, by an estimate, and leaves a KV "
            f"cache of {rows} tokens for games of up to {least}: give a smaller --tokens-per-batch or "
            "--max-tokens, more GPUs, --parallel fsdp --offload all or --adapter-rank (--dry-run compares "
            "them), or set --kv-tokens to try it"
        )
    if rows < least:
        raise UsageError(
            f"the free memory holds a KV cache of {rows} tokens, but a game may have {least}: lower "
            "--max-tokens"
        )
    try:
        return Arena(policy, rows)
    except RuntimeError:
        raise UsageError(f"not enough memory for a KV cache of {rows:,} tokens: lower --kv-tokens") from None


def common_prefix_length(a: bytes, b: bytes) -> int:
    """The number of equal bytes at the start. Bisection over slices, which compare at C speed."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
