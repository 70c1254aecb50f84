"""Decode steps as CUDA graphs, one for each batch size.

A decode step (one new token for each sequence) launches about 20 kernels in each layer, and launching them
one by one takes longer than running them. A graph launches them all at once. It reads the batch that it was
captured with, to which new ones are copied, padded to its size with idle rows that write to the spare page.

The first replay of each graph is compared with the same step run directly; if they differ, none is used.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from prompt_r1.engine.kv_cache import CachedGame, PagedBatch, PagePool

SIZES = (1, 2, 4, 8, *range(16, 257, 16))  # batch sizes
TOLERANCE = 0.05  # largest relative difference in norm between replayed and direct hidden states

Forward = Callable[[PagedBatch], Tensor]
"""A batch of T tokens → last hidden states (T, hidden)."""
Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]
"""Turns a forward into a function that replays it on the same buffers, and overwrites its result."""


class DecodeGraphs:
    """Runs decode steps. A batch size is captured when it first occurs, and replayed from then on."""

    def __init__(self, forward: Forward, pool: PagePool, *, longest: int, capture: Capture) -> None:
        """`longest` is the largest number of tokens in a sequence."""
        self._forward, self._pool, self._longest, self._capture = forward, pool, longest, capture
        self._broken = False  # True: a graph differed, and graphs are no longer used
        # Of each batch size: the batch that its graph reads, and the graph.
        self._graphs: dict[int, tuple[PagedBatch, Replay]] = {}

    def __call__(self, games: Mapping[CachedGame, int]) -> Tensor:
        """The last hidden states (R, hidden) of the new tokens of R games, one of each."""
        count, pool = len(games), self._pool
        if self._broken or count > SIZES[-1]:
            return self._forward(PagedBatch(games, pool))
        size = next(size for size in SIZES if size >= count)
        idle = {CachedGame(-1, [0], [pool.spare]): 1 for _ in range(count, size)}
        batch = PagedBatch({**games, **idle}, pool, longest=self._longest)
        if size not in self._graphs:
            self._graphs[size] = batch, self._captured(partial(self._forward, batch))
        fixed, replay = self._graphs[size]
        for buffer, new in zip(fixed.tensors, batch.tensors, strict=True):
            buffer.copy_(new)
        return replay()[:count]

    def _captured(self, forward: Replay) -> Replay:
        """The graph of a forward, or the forward itself if the graph computes something else."""
        expected = forward().float()
        replay = self._capture(forward)
        difference = float((replay().float() - expected).norm() / expected.norm())
        if difference <= TOLERANCE:
            return replay
        self._broken = True  # also when it is NaN
        warnings.warn(f"a captured decode step differs by {difference:.1%}: no CUDA graphs", stacklevel=2)
        return forward


def capture_cuda_graph(forward: Replay) -> Replay:
    """Capture a forward that has run before as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
