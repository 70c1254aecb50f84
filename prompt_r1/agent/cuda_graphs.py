"""Decode steps as CUDA graphs, one for each batch size.

A decode step (one new token for each sequence) launches about 20 kernels in each layer, and launching them
one by one takes longer than running them. A graph launches them all at once, with one upload, of its inputs,
and one download, of tokens and log-probabilities. It holds fixed addresses, so the inputs are copied into a
buffer that stays. A batch is padded to the next recorded size with idle rows that write to a spare row.

All graphs share one pool of memory, because they never run at the same time. It is as large as the largest of
them needs, above all for three or four matrices [batch × vocabulary] of the draw: about 0.3 GB for 128 rows
of a vocabulary of 152k (calculated, not measured).

Written for NVIDIA GPUs, and not yet run on one. Every recorded step is compared with the same step run
directly; if recording fails or the results differ, decoding continues without graphs. If memory runs out
while a step is recorded, nothing more is recorded until `resume`.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prompt_r1.agent.decode_kernels import (
    RECORDABLE,
    CacheOffsets,
    Chunk,
    Kernel,
    RaggedBatch,
    SharedRows,
    upload,
)
from prompt_r1.agent.kv_cache import Arena
from prompt_r1.agent.sampling import SamplingMix

SIZES = (1, 2, 4, 8, *range(16, 257, 16))  # batch sizes that are recorded
TOLERANCE = 0.05  # largest relative difference in norm between recorded and direct hidden states
IDLE = [0.5, 1.0, 1.0]  # the sampling settings of an idle row


@dataclass(frozen=True)
class Decoded:
    """What a step returns for each of its R sequences. A recorded step overwrites it at its next replay."""

    hidden: Tensor  # (R, hidden) last hidden states
    drawn: Tensor  # (R, 2) float64: the sampled token and its log-probability


DecodeStep = Callable[[], Decoded]
Record = Callable[[DecodeStep], DecodeStep]
"""Turns a step into a function that replays it on the same buffers."""
Forward = Callable[[Tensor, RaggedBatch], Tensor]
"""Tokens (B,) and their batch → last hidden states (B, hidden)."""
Sample = Callable[[Tensor, Tensor, SamplingMix], Tensor]
"""Hidden states (B, hidden), sampling settings (B, 3) and their mix → drawn (B, 2)."""


class DecodeGraphs:
    """Runs decode steps. Each batch size is recorded when it first occurs, and replayed from then on; batches
    with shared rows and without are recorded apart.
    """

    def __init__(
        self, forward: Forward, sample: Sample, arena: Arena, kernel: Kernel, *, longest: int, record: Record
    ) -> None:
        """`longest` is the largest number of tokens in a sequence."""
        self.broken = False  # True: recording has failed, and graphs are no longer used
        self._forward = forward
        self._sample = sample
        self._arena = arena
        self._kernel = kernel
        self._longest = longest
        self._record = record
        self._paused = False  # True: memory ran out while a step was recorded
        # By batch size, sampling settings, and whether rows are shared.
        self._replays: dict[tuple[int, SamplingMix, bool], DecodeStep] = {}
        # (B, 8): of each sequence the token, four fields of its chunk, and `settings_row`.
        self._inputs = torch.zeros(SIZES[-1], 8, dtype=torch.float64, device=arena.keys[0].device)

    def resume(self) -> None:
        """Record again after memory ran out."""
        self._paused = False

    def can_run(self, chunks: Sequence[Chunk], mix: SamplingMix) -> bool:
        """Whether the batch has one new token for each sequence, and its size is or may be recorded."""
        if self.broken or len(chunks) > SIZES[-1] or any(chunk.count > 1 for chunk in chunks):
            return False
        return not self._paused or (_padded(len(chunks)), mix, _any_shared(chunks)) in self._replays

    def __call__(
        self, tokens: list[int], chunks: Sequence[Chunk], settings: Sequence[list[float]], mix: SamplingMix
    ) -> Decoded:
        """Decode a token for each sequence. Writes keys and values of the tokens to the arena."""
        size = _padded(len(tokens))
        rows: list[list[float]] = [
            [token, chunk.start, chunk.length, chunk.shared_start, chunk.shared, *row]
            for token, chunk, row in zip(tokens, chunks, settings, strict=True)
        ]
        rows += [[0, self._arena.spare, 1, 0, 0, *IDLE]] * (size - len(tokens))
        self._inputs[:size] = upload(rows, torch.float64, self._inputs.device)
        key = (size, mix, _any_shared(chunks))
        if key not in self._replays:
            self._replays[key] = self._record_checked(partial(self._step, *key))
        decoded = self._replays[key]()
        return Decoded(decoded.hidden[: len(tokens)], decoded.drawn[: len(tokens)])

    def _step(self, size: int, mix: SamplingMix, any_shared: bool) -> Decoded:
        """The forward and the draw of the first `size` inputs. Reads no value on the host."""
        inputs = self._inputs[:size]
        tokens, starts, lengths, shared_starts, shared = inputs[:, :5].T.long().unbind()
        queries = torch.arange(size + 1, dtype=torch.int32, device=tokens.device)

        def offsets(starts: Tensor, lengths: Tensor) -> CacheOffsets:
            starts = torch.cat([starts, starts[:1]]).int()  # the last entry is not read
            return CacheOffsets(queries, starts, lengths.int(), longest_query=1, longest_key=self._longest)

        batch = RaggedBatch(
            self._arena.keys,
            self._arena.values,
            self._kernel,
            rows=starts + lengths - shared - 1,
            positions=lengths - 1,
            offsets=offsets(starts, lengths - shared),
            shared=SharedRows(offsets(shared_starts, shared), shared == 0) if any_shared else None,
        )
        hidden = self._forward(tokens, batch)
        return Decoded(hidden, self._sample(hidden, inputs[:, 5:], mix))

    def _record_checked(self, step: DecodeStep) -> DecodeStep:
        """Record a step. Returns the step itself if recording fails or the result differs.

        Matrix products may be summed in another order during capture. In bfloat16, single entries can then
        differ a lot, but the norm of all differences stays small, and few rows draw another token.

        Raises OutOfMemoryError if memory runs out; decoding can continue without new recordings.
        """
        expected = step()
        try:
            replay = self._record(step)
            found = replay()
        except RuntimeError as error:
            if _ran_out_of_memory(error):
                self._paused = True
                raise torch.OutOfMemoryError(f"while a decode step was recorded: {error}") from error
            return self._give_up(step, str(error))
        exact = expected.hidden.float()
        difference = float((found.hidden.float() - exact).norm() / exact.norm())
        if not difference <= TOLERANCE:  # also when it is NaN
            return self._give_up(step, f"the recorded step differs by {difference:.1%}")
        others = int((found.drawn[:, 0] != expected.drawn[:, 0]).sum())
        if others > 1 + len(exact) // 10:
            return self._give_up(step, f"the recorded step samples {others} of {len(exact)} other tokens")
        return replay

    def _give_up(self, step: DecodeStep, reason: str) -> DecodeStep:
        self.broken = True
        warnings.warn(f"decoding continues without CUDA graphs: {reason}", stacklevel=2)
        return step


def _any_shared(chunks: Sequence[Chunk]) -> bool:
    return any(chunk.shared for chunk in chunks)


def _padded(count: int) -> int:
    """The smallest recorded size of at least `count`."""
    return next(size for size in SIZES if size >= count)


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is out-of-memory, or was raised while one was handled: ending a capture may fail."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _workspace_in_pool() -> Iterator[None]:
    """Let a capture allocate the workspace of its matrix products in the graph's pool, for itself alone.

    torch keeps a workspace for each stream, and forgets it when any graph of the stream is freed. Graphs of
    two engines on the same workspace would then write to memory that one of them has given back.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def step_recorder(kernel: Kernel, device: torch.device) -> Record | None:
    """The function that records steps as CUDA graphs; None for a kernel that cannot be recorded."""
    if kernel not in RECORDABLE:
        return None
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    return partial(_record_cuda_graph, pool=pool, stream=stream)


def _record_cuda_graph(
    step: DecodeStep, *, pool: "torch.cuda._POOL_HANDLE", stream: torch.cuda.Stream
) -> DecodeStep:
    """Record a step as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream(stream.device)
    # This makes the stream's device the current one, on which the capture begins; and the stream of before
    # is the current one again even if ending the capture fails.
    with torch.cuda.stream(stream):
        stream.wait_stream(before)
        for _ in range(2):
            step()
        with _workspace_in_pool():
            try:
                # "thread_local": the thread that writes checkpoints may use the device during the capture.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    out = step()
            except RuntimeError:
                # A capture that waits for the device cannot be ended. Its pool stays open then, and torch
                # would not free cached memory before it reports that none is left.
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(stream.device.index, pool)
                raise
        # What a graph would return that replays nothing.
        out.hidden.fill_(math.nan)
        out.drawn.fill_(-1)
    before.wait_stream(stream)

    def replay() -> Decoded:
        graph.replay()
        return out

    return replay
