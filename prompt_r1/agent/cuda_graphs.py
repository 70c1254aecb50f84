"""Decode steps as CUDA graphs, recorded once for each batch size.

A decode step (one new token for each sequence) launches about 57 small kernels in each layer, and launching
them one by one takes longer than running them. A graph launches them all at once. It holds fixed addresses,
so the inputs of a step are copied into a buffer that stays; weights and arena stay anyway. A batch is padded
to the next recorded size with idle rows that write to a spare row of the arena.

Written for NVIDIA GPUs, and not yet run on one. Every recorded step is compared with the same step run
directly; if recording fails or the results differ, decoding continues without graphs.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prompt_r1.agent.decode_kernels import RECORDABLE, CacheOffsets, Chunk, Kernel
from prompt_r1.agent.kv_cache import Arena

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batch sizes that are recorded
TOLERANCE = 0.05  # largest relative difference in norm between recorded and direct hidden states

DecodeStep = Callable[[], Tensor]
Record = Callable[[DecodeStep], DecodeStep]
"""Turns a step into a function that replays it on the same buffers."""
Forward = Callable[[Tensor, "DecodeBatch"], Tensor]
"""Tokens (B,) and their batch → last hidden states (B, hidden)."""


@dataclass(frozen=True)
class DecodeBatch:
    """One new token for each of B sequences. Has what `attend` reads of a `RaggedBatch`, all in tensors."""

    keys: list[Tensor]
    values: list[Tensor]
    kernel: Kernel
    rows: Tensor  # (B,) the arena row of each new token
    positions: Tensor  # (B,) its position in its sequence
    offsets: CacheOffsets


class DecodeGraphs:
    """Runs decode steps. Each batch size is recorded when it first occurs, and replayed from then on."""

    def __init__(
        self,
        forward: Forward,
        arena: Arena,
        kernel: Kernel,
        *,
        longest: int,
        record: Record,
    ) -> None:
        """`longest` is the largest number of tokens in a sequence."""
        self.broken = False  # True: recording has failed, and graphs are no longer used
        self._forward = forward
        self._arena = arena
        self._kernel = kernel
        self._longest = longest
        self._record = record
        self._replays: dict[int, DecodeStep] = {}
        # (3, B): token, first arena row and length of each sequence.
        self._inputs = torch.zeros(3, SIZES[-1], dtype=torch.int64, device=arena.keys[0].device)

    def can_run(self, chunks: list[Chunk]) -> bool:
        """Whether the batch has one new token for each sequence and fits the largest recorded size."""
        return not self.broken and len(chunks) <= SIZES[-1] and all(chunk.count == 1 for chunk in chunks)

    def __call__(self, tokens: list[int], chunks: list[Chunk]) -> Tensor:
        """Last hidden states (B, hidden). Writes keys and values of the B tokens to the arena."""
        size = next(size for size in SIZES if size >= len(tokens))
        idle = size - len(tokens)
        inputs = [
            tokens + [0] * idle,
            [chunk.start for chunk in chunks] + [self._arena.spare] * idle,
            [chunk.length for chunk in chunks] + [1] * idle,
        ]
        self._inputs[:, :size].copy_(torch.tensor(inputs))
        step = partial(self._step, size)
        if size not in self._replays:
            expected = step()
            self._replays[size] = self._record_checked(step, expected)
        # Clone: the next replay writes its result into the same buffer.
        return self._replays[size]()[: len(tokens)].clone()

    def _step(self, size: int) -> Tensor:
        """The forward of the first `size` inputs. It reads no value on the host, so it can be recorded."""
        tokens, starts, lengths = self._inputs[:, :size]
        offsets = CacheOffsets(
            queries=torch.arange(size + 1, dtype=torch.int32, device=tokens.device),
            starts=torch.cat([starts, starts[:1]]).int(),
            lengths=lengths.int(),
            longest_query=1,
            longest_key=self._longest,
        )
        positions = lengths - 1
        batch = DecodeBatch(
            self._arena.keys, self._arena.values, self._kernel, starts + positions, positions, offsets
        )
        return self._forward(tokens, batch)

    def _record_checked(self, step: DecodeStep, expected: Tensor) -> DecodeStep:
        """Record a step. Returns the step itself if recording fails or the result differs.

        Matrix products may be summed in another order during capture. In bfloat16, single entries can then
        differ a lot, but the norm of all differences stays small.
        """
        try:
            replay = self._record(step)
            found = replay().float()
        except RuntimeError as error:
            return self._give_up(step, str(error))
        difference = float((found - expected.float()).norm() / expected.float().norm())
        if not difference <= TOLERANCE:  # also when it is NaN
            return self._give_up(step, f"the recorded step differs by {difference:.1%}")
        return replay

    def _give_up(self, step: DecodeStep, reason: str) -> DecodeStep:
        self.broken = True
        warnings.warn(f"decoding continues without CUDA graphs: {reason}", stacklevel=2)
        return step


def step_recorder(kernel: Kernel) -> Record | None:
    """The function that records steps as CUDA graphs; None for a kernel that cannot be recorded."""
    if kernel not in RECORDABLE:
        return None
    return partial(_record_cuda_graph, pool=torch.cuda.graph_pool_handle())


def _record_cuda_graph(step: DecodeStep, *, pool: "torch.cuda._POOL_HANDLE") -> DecodeStep:
    """Record a step as a CUDA graph. All sizes share one memory pool: they never run at the same time."""
    stream = torch.cuda.Stream()  # the warm-up must not run on the stream that is captured
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": the thread that writes checkpoints may use the device during the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
