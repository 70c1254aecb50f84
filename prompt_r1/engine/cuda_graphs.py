"""Decode steps as CUDA graphs, one for each batch size.

A decode step computes one new token for each sequence. It launches about 20 kernels in each layer, and
launching them one by one takes longer than running them. A graph launches all kernels at once. It always
reads the buffers of the batch that it was captured with. So each new batch is padded to the size of the graph
and copied into these buffers. The padding consists of idle sequences, which write to the spare block.

The first replay of each graph is compared with the same step run directly. If the results differ, graphs are
not used any longer.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prompt_r1.engine.kv_cache import BlockPool, TokenSequence
from prompt_r1.engine.paged_attention import PagedBatch

# The sizes of batches. A single game is padded to 2, because torch.compile would make another graph for one
# token.
SIZES = (2, 4, 8, *range(16, 257, 16))
# The largest relative difference (in norm) between hidden states of the first replay and the direct run.
TOLERANCE = 0.05

Forward = Callable[[PagedBatch], Tensor]
"""A batch of T tokens → last hidden states (T, hidden)."""
Step = Callable[[], Tensor]
"""A forward over a fixed batch, run directly or replayed."""
Capture = Callable[[Step], Step]
"""Turns a step into one that replays it on the same buffers. Each replay overwrites the result."""


class DecodeGraphs:
    """Runs decode steps. The first step of a batch size is captured, and later steps replay it."""

    def __init__(self, forward: Forward, pool: BlockPool, *, longest: int, capture: Capture) -> None:
        """`longest` is the largest number of tokens in a sequence."""
        self._forward = forward
        self._pool = pool
        self._longest = longest
        self._capture = capture
        self._broken = False  # True: a graph computed something else, so graphs are not used any longer.
        # Batch size → the batch whose buffers the graph reads, and the graph.
        self._graphs: dict[int, tuple[PagedBatch, Step]] = {}

    def fits(self, new_tokens: Mapping[TokenSequence, list[int]]) -> bool:
        """Whether a graph can compute these tokens: one of each sequence, and not too many sequences."""
        only_decodes = all(len(new) == 1 for new in new_tokens.values())
        return only_decodes and len(new_tokens) <= SIZES[-1] and not self._broken

    def __call__(self, new_tokens: Mapping[TokenSequence, list[int]]) -> Tensor:
        """The last hidden states (R, hidden) of R sequences whose new tokens fit a graph."""
        count = len(new_tokens)
        size = next(size for size in SIZES if size >= count)
        padded = dict(new_tokens)
        for _ in range(count, size):
            idle = TokenSequence(number=-1, block_table=[self._pool.spare])
            padded[idle] = [0]
        batch = PagedBatch(padded, self._pool, longest=self._longest)
        if size not in self._graphs:
            self._graphs[size] = batch, self._capture_and_compare(partial(self._forward, batch))
        fixed, replay = self._graphs[size]
        for buffer, new in zip(fixed.tensors, batch.tensors, strict=True):
            buffer.copy_(new)
        return replay()[:count]

    def _capture_and_compare(self, step: Step) -> Step:
        """The graph of a step, or the step itself if the graph computes something else."""
        expected = step().float()
        replay = self._capture(step)
        replayed = replay().float()
        difference = float((replayed - expected).norm() / expected.norm())
        if difference <= TOLERANCE:
            return replay
        self._broken = True  # The difference is too large, or NaN.
        warnings.warn(f"a captured decode step differs by {difference:.1%}: no CUDA graphs", stacklevel=2)
        return step


class CudaGraphs:
    """Captures steps as CUDA graphs. They share one memory pool, because no two of them run at once."""

    def __init__(self) -> None:
        self._memory: Any = None  # the pool's handle, from the first graph; its type is private to torch

    def __call__(self, step: Step) -> Step:
        """Capture a step that has run before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = step()
        self._memory = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
