"""Decode steps as CUDA graphs, one for each batch size.

A decode step (one new token for each sequence) launches about 20 kernels in each layer, and launching them
one by one takes longer than running them. A graph launches them all at once. It reads its inputs from fixed
buffers; a batch is padded to the next size with idle rows that write to the spare page.

Not measured: no GPU has run it. The first replay of each graph is compared with the same step run directly;
if they differ, decoding continues without graphs.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prompt_r1.agent.kv_cache import Chunk, PagedBatch, PagePool, upload
from prompt_r1.agent.sampling import SamplingMix

SIZES = (1, 2, 4, 8, *range(16, 257, 16))  # batch sizes
TOLERANCE = 0.05  # largest relative difference in norm between replayed and direct hidden states
IDLE = [0.5, 1.0, 1.0]  # the sampling settings of an idle row


@dataclass(frozen=True)
class Decoded:
    """What a step returns for each of its R sequences. A graph overwrites it at its next replay."""

    hidden: Tensor  # (R, hidden) last hidden states
    drawn: Tensor  # (R, 2) float64: the sampled token and its log-probability


Replay = Callable[[], Decoded]
Capture = Callable[[Replay], Replay]
"""Turns a step into a function that replays it on the same buffers."""
DecodeStep = Callable[[Tensor, PagedBatch, Tensor, SamplingMix], Decoded]
"""Tokens (R,), their batch, the sampling settings (R, 3) and their mix → what is decoded."""


class DecodeGraphs:
    """Runs decode steps. A batch size is captured when it first occurs, and replayed from then on."""

    def __init__(self, step: DecodeStep, pool: PagePool, *, longest: int, capture: Capture) -> None:
        """`longest` is the largest number of tokens in a sequence."""
        device = pool.keys.device
        self._step, self._pool, self._longest, self._capture = step, pool, longest, capture
        self._broken = False  # True: a graph differed, and graphs are no longer used
        self._graphs: dict[tuple[int, SamplingMix], Replay] = {}
        # Of each sequence: token, length, block table; and its sampling settings.
        self._inputs = torch.zeros(SIZES[-1], 2 + pool.pages_for(longest), dtype=torch.int64, device=device)
        self._settings = torch.zeros(SIZES[-1], 3, dtype=torch.float64, device=device)

    def can_run(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the batch has one new token for each sequence, and a size that is captured."""
        return not self._broken and len(chunks) <= SIZES[-1] and all(chunk.count == 1 for chunk in chunks)

    def __call__(
        self, tokens: list[int], chunks: Sequence[Chunk], settings: list[list[float]], mix: SamplingMix
    ) -> Decoded:
        """Decode a token for each sequence. Writes keys and values of the tokens to the pages."""
        count, width = len(tokens), self._inputs.shape[1]
        size = next(size for size in SIZES if size >= count)
        idle = [0, 1, *[self._pool.spare] * (width - 2)]
        rows = [[token, one.length, *one.pages] for token, one in zip(tokens, chunks, strict=True)]
        rows = [row + idle[len(row) :] for row in rows] + [idle] * (size - count)
        device = self._inputs.device
        self._inputs[:size] = upload(rows, torch.int64, device)
        self._settings[:size] = upload(settings + [IDLE] * (size - count), torch.float64, device)
        if (size, mix) not in self._graphs:
            self._graphs[size, mix] = self._captured(partial(self._from_buffers, size, mix))
        decoded = self._graphs[size, mix]()
        return Decoded(decoded.hidden[:count], decoded.drawn[:count])

    def _from_buffers(self, size: int, mix: SamplingMix) -> Decoded:
        """The step on the first rows of the buffers. Reads no value on the host."""
        tokens, lengths = self._inputs[:size, 0], self._inputs[:size, 1]
        tables, positions = self._inputs[:size, 2:], lengths - 1
        pages = tables.gather(1, (positions // self._pool.page_size)[:, None])[:, 0]
        starts = torch.arange(size + 1, dtype=torch.int32, device=tokens.device)
        batch = PagedBatch(
            self._pool,
            positions,
            pages,
            starts,
            lengths.int(),
            tables.int(),
            most_new=1,
            longest=self._longest,
        )
        return self._step(tokens, batch, self._settings[:size], mix)

    def _captured(self, step: Replay) -> Replay:
        """The graph of a step, or the step itself if the graph computes something else."""
        expected = step().hidden.float()
        replay = self._capture(step)
        difference = float((replay().hidden.float() - expected).norm() / expected.norm())
        if difference <= TOLERANCE:
            return replay
        self._broken = True  # also when it is NaN
        warnings.warn(f"a captured decode step differs by {difference:.1%}: no CUDA graphs", stacklevel=2)
        return step


def capture_cuda_graph(step: Replay) -> Replay:
    """Capture a step that has run before as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Decoded:
        graph.replay()
        return out

    return replay
