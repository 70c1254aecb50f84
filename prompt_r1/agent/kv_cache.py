"""The KV cache: an arena with one row for each token, where a sequence occupies consecutive rows."""

import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from prompt_r1.agent.policy import Policy, attention_shape

# Extend a sequence in place unless copying would save at least this many more prefix tokens.
IN_PLACE_BONUS = 16
# Share of the free memory that the arena takes if no size is given. The update needs the rest.
MEMORY_SHARE = 0.3


@dataclass(eq=False)
class Segment:
    """The rows of one sequence: its cached tokens, and space for more."""

    start: int  # first row
    size: int  # rows
    tokens: list[int]  # whose keys and values are cached
    # The last hidden state (hidden,) of each prompt that ended in this sequence, by the prompt's length. The
    # next game with the same prompt samples from it without a forward.
    end_states: dict[int, Tensor] = field(default_factory=dict)
    last_used: int = 0  # step number

    @property
    def end(self) -> int:
        return self.start + self.size

    def usable_prefix(self, prompt: list[int]) -> int:
        """How many first tokens of a prompt need no forward.

        Sampling begins with the hidden state of the prompt's last token, so that token must be computed
        unless its state is stored.
        """
        shared = common_prefix_length(self.tokens, prompt)
        if shared == len(prompt) and shared not in self.end_states:
            return shared - 1
        return shared


@dataclass(frozen=True)
class CachedPrefix:
    """A cached sequence that begins like a prompt."""

    segment: Segment
    length: int  # first tokens of the prompt that need no forward
    in_place: bool  # the prompt continues the whole sequence, and no running job uses it

    @property
    def value(self) -> int:
        """Prefix tokens saved, plus a bonus if nothing has to be copied."""
        return self.length + IN_PLACE_BONUS if self.in_place else self.length


@dataclass(frozen=True)
class Allocation:
    """Free rows of the arena for a sequence, and the segments that remain after eviction."""

    start: int
    remaining: list[Segment]


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

    def find_gap(self, size: int, segments: Iterable[Segment]) -> int | None:
        """The first of the first `size` consecutive rows that are free; None if there are none."""
        end = 0
        for segment in sorted(segments, key=attrgetter("start")):
            if segment.start - end >= size:
                return end
            end = segment.end
        return end if self.rows - end >= size else None

    def allocate(
        self,
        size: int,
        segments: Sequence[Segment],
        busy: Container[Segment],
        prefix: CachedPrefix | None,
    ) -> Allocation | None:
        """Find `size` free rows, evicting as few idle segments as possible, the least recently used first.

        The segment of `prefix` is evicted last, because it is about to be copied. A prefix that continues in
        place gives up its segment: the result may overlap it, and starts where it starts if there is space
        to grow. Returns None if evicting every idle segment would not be enough.
        """
        source = prefix.segment if prefix is not None else None
        grows_in_place = prefix is not None and prefix.in_place
        kept = [segment for segment in segments if not (grows_in_place and segment is source)]
        idle = [segment for segment in kept if segment not in busy]
        idle.sort(key=lambda segment: (segment is source, segment.last_used))

        remaining = kept
        start = self.find_gap(size, remaining)
        if start is None:
            remaining = self._evict_fewest(size, kept, idle)
            start = self.find_gap(size, remaining)
        if start is None:
            return None
        if source is not None and grows_in_place:
            limit = self.rows
            for segment in remaining:
                if segment.start > source.start:
                    limit = min(limit, segment.start)
            if source.start + size <= limit:
                start = source.start
        return Allocation(start, remaining)

    def _evict_fewest(self, size: int, kept: list[Segment], idle: list[Segment]) -> list[Segment]:
        """Remove as few of the first segments of `idle` as leave `size` free rows, or all of them.

        Each further eviction can only enlarge the gaps, so the number is found by bisection.
        """

        def without_first(count: int) -> list[Segment]:
            evicted = set(idle[:count])
            return [segment for segment in kept if segment not in evicted]

        fewest, most = 1, len(idle)
        while fewest < most:
            middle = (fewest + most) // 2
            if self.find_gap(size, without_first(middle)) is None:
                fewest = middle + 1
            else:
                most = middle
        return without_first(most)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy rows; the two ranges may overlap."""
        if source == target or not count:
            return
        overlap = abs(source - target) < count
        for cache in (*self.keys, *self.values):
            rows = cache[:, source : source + count]
            cache[:, target : target + count] = rows.clone() if overlap else rows


def find_prefix(
    segments: Iterable[Segment], busy: Container[Segment], prompt: list[int]
) -> CachedPrefix | None:
    """The most valuable cached prefix of a prompt; None if no cached sequence begins like it."""

    def likely_length(segment: Segment) -> int:
        """The sequence's length if the prompt has its last token at the same position, else 0."""
        length = len(segment.tokens)
        return length if segment.tokens[-1:] == prompt[length - 1 : length] else 0

    best: CachedPrefix | None = None
    position = 0
    # The likely prefixes first, the longest of them first: then few of the others are compared in full.
    for segment in sorted(segments, key=likely_length, reverse=True):
        # A sequence that differs from the prompt at `position` cannot be more valuable than the best so far.
        if segment.tokens[position : position + 1] != prompt[position : position + 1]:
            continue
        length = segment.usable_prefix(prompt)
        in_place = segment not in busy and length == len(segment.tokens)
        prefix = CachedPrefix(segment, length, in_place)
        if length and (best is None or prefix.value > best.value):
            best = prefix
            position = max(best.value - IN_PLACE_BONUS, 0)
    return best


def affordable_rows(policy: Policy) -> int:
    """The number of rows that fit into MEMORY_SHARE of the memory that is free now."""
    if policy.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(policy.device)
        free += torch.cuda.memory_reserved(policy.device) - torch.cuda.memory_allocated(policy.device)
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    row_bytes = attention_shape(policy.model.config).cache_entries * policy.compute.itemsize
    return int(MEMORY_SHARE * free) // row_bytes


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """The number of equal tokens at the start. Bisection over slices, which compare at C speed."""
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
