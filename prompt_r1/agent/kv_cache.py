"""The KV cache: an arena of rows, one a token, in which each sequence owns a segment of consecutive rows."""

import os
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from prompt_r1.agent.policy import Policy

IN_PLACE = 16  # tokens: to continue a sequence, rather than to copy a longer prefix, is worth so many
SHARE = 0.3  # of the free memory, when the arena is sized by it: an update needs the rest


@dataclass(eq=False)
class Segment:
    """The place of one sequence: what is cached of it, and room to grow."""

    start: int
    size: int
    tokens: list[int]  # whose keys and values are cached
    # By length, the last hidden state of a prompt that ended there: (hidden,). Whoever asks for the same
    # prompt begins to sample at once.
    ends: dict[int, Tensor] = field(default_factory=dict)
    last_used: int = 0

    def usable(self, prompt: list[int]) -> int:
        """How many first tokens of a prompt need not be computed. Its last one gives the hidden state that
        sampling begins with: it is computed unless that is known.
        """
        shared = common_prefix(self.tokens, prompt)
        return shared if shared < len(prompt) or shared in self.ends else shared - 1


class Arena:
    """Keys and values of all layers: `rows` tokens in the compute dtype, on the device of the policy.

    One more row, `spare`, belongs to no sequence: it takes what the idle rows of a batch write.
    """

    def __init__(self, policy: Policy, rows: int) -> None:
        layers, *shape = kv_shape(policy)
        # Heads first: a head's rows of one sequence lie together, the fastest order for a CPU.
        size, dtype, device = (shape[0], rows + 1, shape[1]), policy.compute, policy.device
        self.keys = [torch.empty(size, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(size, dtype=dtype, device=device) for _ in range(layers)]
        self.rows = self.spare = rows

    def gap(self, size: int, segments: Iterable[Segment]) -> int | None:
        """The first row of the first gap between the segments that has `size` rows."""
        end = 0
        for segment in sorted(segments, key=attrgetter("start")):
            if segment.start - end >= size:
                return end
            end = segment.start + segment.size
        return end if self.rows - end >= size else None

    def make_room(
        self,
        size: int,
        segments: Sequence[Segment],
        busy: Container[Segment],
        source: Segment | None,
        *,
        moves: bool,
    ) -> tuple[int, list[Segment]] | None:
        """Where `size` rows are free, after dropping as few of the longest idle segments as will do, and the
        segments that stay. `source`, about to be copied, goes last. None when even dropping all would not do.

        A source that moves does not stay, but may be where its copy will be: it grows in place if it can.
        """
        kept = [segment for segment in segments if not (moves and segment is source)]
        idle = [segment for segment in kept if segment not in busy]
        idle.sort(key=lambda segment: (segment is source, segment.last_used))

        def without(dropped: int) -> list[Segment]:
            gone = set(idle[:dropped])
            return [segment for segment in kept if segment not in gone]

        def fits(dropped: int) -> bool:
            return self.gap(size, without(dropped)) is not None

        stay, start = kept, self.gap(size, kept)
        if start is None:
            # The more is dropped the more fits: a full arena of many sequences is searched by halving.
            stay = without(bisect_left(range(len(idle) + 1), True, lo=1, key=fits))
            start = self.gap(size, stay)
        if start is None:
            return None
        if source is not None and moves:
            limit = min((s.start for s in stay if s.start > source.start), default=self.rows)
            start = source.start if source.start + size <= limit else start
        return start, stay

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy rows; the two ranges may overlap."""
        if source == target or not count:
            return
        for cache in (*self.keys, *self.values):
            rows = cache[:, source : source + count]
            cache[:, target : target + count] = rows.clone() if abs(source - target) < count else rows


def best_source(
    segments: Iterable[Segment], busy: Container[Segment], prompt: list[int]
) -> tuple[Segment | None, int, bool]:
    """The cached sequence worth most to a prompt, how many of its tokens are usable, and whether the prompt
    continues it in place: that of a busy one is another game's.
    """
    best: tuple[Segment | None, int, bool] = None, 0, False
    worth = 0

    def promise(segment: Segment) -> int:
        length = len(segment.tokens)
        return length if segment.tokens[-1:] == prompt[length - 1 : length] else 0

    # Whose last token the prompt has there too is likely its beginning; few others are worth as much then.
    for segment in sorted(segments, key=promise, reverse=True):
        # Who differs here is worth no more than the best so far: most need not be compared whole.
        border = max(worth - IN_PLACE, 0)
        if segment.tokens[border : border + 1] != prompt[border : border + 1]:
            continue
        usable = segment.usable(prompt)
        continues = segment not in busy and usable == len(segment.tokens)
        if usable and usable + IN_PLACE * continues > worth:
            best, worth = (segment, usable, continues), usable + IN_PLACE * continues
    return best


def kv_shape(policy: Policy) -> tuple[int, int, int]:
    """Layers, key-value heads, head dim."""
    config = policy.model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, dim


def affordable_rows(policy: Policy) -> int:
    """The rows that fit a share of what is free now on the policy's device."""
    if policy.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(policy.device)
        free += torch.cuda.memory_reserved(policy.device) - torch.cuda.memory_allocated(policy.device)
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    layers, kv_heads, dim = kv_shape(policy)
    return int(SHARE * free) // (2 * layers * kv_heads * dim * policy.compute.itemsize)


def common_prefix(a: list[int], b: list[int]) -> int:
    """The number of equal tokens at the start, by bisection over slices (compared at C speed)."""
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
