"""Decoding as CUDA graphs: the forward in which every sequence has one new token, recorded by batch size.

Such a forward is some 57 small kernels a layer, and launching them one by one takes longer than what they
compute. A graph launches them all at once. It holds addresses, so everything that changes from step to step
lies in buffers that stay: weights and arena do anyway, tokens and places are copied into one here. A batch is
filled up to the next recorded size with idle rows that write to a spare row of the arena.

Written for NVIDIA GPUs and not yet run on one. Every recording is checked against the same forward without a
graph; where recording fails or disagrees, decoding goes on without.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prompt_r1.agent.attention import RECORDABLE, Chunk, Kernel, Offsets
from prompt_r1.agent.kv_cache import Arena

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of recorded batches
TOLERANCE = 0.05  # of the norm of all hidden states

Step = Callable[[], Tensor]
Record = Callable[[Step], Step]
"""Makes of a step what replays it on the same buffers."""
Forward = Callable[[Tensor, "Decoding"], Tensor]
"""Tokens (B,) and their places → last hidden states (B, hidden)."""


@dataclass(frozen=True)
class Decoding:
    """One new token a sequence: what `attend` reads of a batch (see `Ragged`), all of it in tensors."""

    keys: list[Tensor]
    values: list[Tensor]
    kernel: Kernel
    rows: Tensor  # (B,) the arena row of each new token
    positions: Tensor  # (B,) its position in its sequence
    offsets: Offsets


class DecodeGraphs:
    """Forwards of one token a sequence, recorded at the first batch of each size."""

    def __init__(
        self,
        forward: Forward,
        arena: Arena,
        kernel: Kernel,
        *,
        longest: int,
        record: Record,
    ) -> None:
        """For sequences of at most `longest` tokens."""
        self.broken = False
        self._forward, self._arena, self._kernel, self._longest = forward, arena, kernel, longest
        self._record = record
        self._replays: dict[int, Step] = {}
        # Tokens, first arena rows and lengths of the sequences.
        self._inputs = torch.zeros(3, SIZES[-1], dtype=torch.int64, device=arena.keys[0].device)

    def takes(self, chunks: list[Chunk]) -> bool:
        """Is this a batch for a graph: one token each, and no more sequences than the largest size?"""
        return not self.broken and len(chunks) <= SIZES[-1] and all(chunk.count == 1 for chunk in chunks)

    def __call__(self, ids: list[int], chunks: list[Chunk]) -> Tensor:
        """Last hidden states (B, hidden); keys and values of the B tokens are then in the arena."""
        size = next(size for size in SIZES if size >= len(ids))
        idle = size - len(ids)
        inputs = [
            ids + [0] * idle,
            [chunk.start for chunk in chunks] + [self._arena.spare] * idle,
            [chunk.length for chunk in chunks] + [1] * idle,
        ]
        self._inputs[:, :size].copy_(torch.tensor(inputs))
        step = partial(self._step, size)
        if size not in self._replays:
            expected = step()
            self._replays[size] = self._checked(step, expected)
        # The next step writes into the same buffer: what is kept of this one must not lie there.
        return self._replays[size]()[: len(ids)].clone()

    def _step(self, size: int) -> Tensor:
        """The forward of the first `size` inputs, in tensors alone: nothing of it depends on the host."""
        tokens, starts, lengths = self._inputs[:, :size]
        edges = torch.arange(size + 1, dtype=torch.int32, device=tokens.device)
        offsets = Offsets(
            queries=edges,
            starts=torch.cat([starts, starts[:1]]).int(),
            lengths=lengths.int(),
            longest_query=1,
            longest_key=self._longest,
        )
        arena, positions = self._arena, lengths - 1
        places = Decoding(arena.keys, arena.values, self._kernel, starts + positions, positions, offsets)
        return self._forward(tokens, places)

    def _checked(self, step: Step, expected: Tensor) -> Step:
        """The recording of a step, or the step itself where that fails or computes something else.

        Under capture matrix products may be summed in another order: in bfloat16 single entries may then
        differ by much, all of them together by little.
        """
        try:
            replay = self._record(step)
            found = replay().float()
        except RuntimeError as error:
            return self._without(step, str(error))
        difference = float((found - expected.float()).norm() / expected.float().norm())
        if not difference <= TOLERANCE:
            return self._without(step, f"the recorded step differs by {difference:.1%}")
        return replay

    def _without(self, step: Step, reason: str) -> Step:
        self.broken = True
        warnings.warn(f"decoding goes on without CUDA graphs: {reason}", stacklevel=2)
        return step


def recorder(kernel: Kernel) -> Record | None:
    """How steps are recorded with this kernel: as CUDA graphs, or not at all."""
    return partial(_cuda_graph, pool=torch.cuda.graph_pool_handle()) if kernel in RECORDABLE else None


def _cuda_graph(step: Step, *, pool: "torch.cuda._POOL_HANDLE") -> Step:
    """Record a step as a CUDA graph; all sizes share one memory pool, for they never run at the same time."""
    stream = torch.cuda.Stream()  # warm-up must not happen on the stream that is recorded
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads (one writes checkpoints) may go on with the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
