"""Single forwards of the engine, and the limits of the device that they are compared with.

A decode step reads all weights, and the keys and values of every sequence: it takes at least bytes /
bandwidth. A prefill of many tokens is limited by arithmetic: it takes at least FLOP / (FLOP/s). Both limits
are measured in the same run, by a copy and a matrix product. Times are medians.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.measuring import seconds
from prompt_r1.agent.attention import attention_shape
from prompt_r1.agent.cuda_graphs import Decoded, Record
from prompt_r1.agent.decode_kernels import Chunk, one_by_one, ragged_batch
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.sampling import Sampling, SamplingMix, settings_row

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}  # of the product of square matrices


@dataclass(frozen=True)
class Limits:
    """What the device can do in a second."""

    bandwidth: float  # bytes read and written by a copy
    flops: float  # FLOP of a product of random matrices


def measure_limits(device: torch.device, dtype: torch.dtype, rounds: int) -> Limits:
    """Measure the limits with a copy and a matrix product."""
    size, side = COPY_BYTES[device.type], MATRIX_SIDE[device.type]
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * size / seconds(lambda: target.copy_(source), rounds)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return Limits(bandwidth, 2 * side**3 / seconds(lambda: a @ b, rounds))


def attention_error(policy: Policy) -> tuple[str, float]:
    """The name of the kernel that the engine chooses here, and its largest difference from float64.

    The batches have prompts and single tokens of mixed lengths, in arbitrary places of the arena, and in one
    of them sequences that share their first tokens.
    """
    device, dtype = policy.device, policy.compute
    shape = attention_shape(policy.model.config)
    kernel = policy.attention.decode
    keys, values = torch.randn(2, shape.kv_heads, 6000, shape.dim, device=device, dtype=dtype)
    mixed = [Chunk(0, 1, 4000, 1999), Chunk(1, 300, 0, 300), Chunk(301, 1, 3000, 1), Chunk(302, 70, 500, 900)]
    single = [Chunk(column, 1, 5200 - 700 * column, 690 - 80 * column) for column in range(8)]
    shared = [
        Chunk(0, 1, 4000, 1999, shared=600, shared_start=3000),
        Chunk(1, 300, 0, 300),
        Chunk(301, 70, 500, 900, shared=600, shared_start=3000),
    ]
    worst = 0.0
    for chunks in (mixed, single, shared):
        count = sum(chunk.count for chunk in chunks)
        query = torch.randn(count, shape.heads, shape.dim, device=device, dtype=dtype)
        batch = ragged_batch(chunks, kernel, device)
        scale = query.shape[-1] ** -0.5
        exact = one_by_one(query.double(), keys.double(), values.double(), batch, scale)
        error = (kernel(query, keys, values, batch, scale, None) - exact).abs().max()
        worst = max(worst, float(error))
    return kernel.__name__, worst


@dataclass(frozen=True)
class Steps:
    """The same decode step, run directly and as a CUDA graph."""

    eager: Callable[[], Decoded]
    recorded: Callable[[], Decoded] | None  # None: the engine records nothing on this device


class Bench:
    """Forwards of an engine without games: its cache holds random keys and values."""

    def __init__(
        self, policy: Policy, *, rows: int, longest: int, rounds: int, record: Record | None = None
    ) -> None:
        """`record` as in `Engine`."""
        self.policy = policy
        self.rounds = rounds
        self.engine = Engine(policy, stop_ids=frozenset(), max_tokens=longest, kv_tokens=rows, record=record)
        self.engine._allocate_arena()
        self.graphs = self.engine._graphs
        assert self.engine._arena is not None
        for cache in (*self.engine._arena.keys, *self.engine._arena.values):
            cache.normal_()
        self.shape = attention_shape(policy.model.config)
        head, embedding = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
        self.head_weights = head.weight.numel()
        # Weights that a step multiplies with: not an embedding of its own, of which it reads only some rows.
        self.multiplied_weights = sum(weight.numel() for weight in policy.model.parameters())
        if head.weight is not embedding.weight:
            self.multiplied_weights -= embedding.weight.numel()

    def steps(self, sequences: int, context: int) -> Steps:
        """A decode step, sampling included, with `context` tokens in each sequence."""
        chunks = [Chunk(n, 1, n * (context + 1), context + 1) for n in range(sequences)]
        tokens = [0] * sequences
        sampling, mix = [settings_row(Sampling(), 0.5)] * sequences, SamplingMix.of([Sampling()])
        settings = torch.tensor(sampling, dtype=torch.float64, device=self.policy.device)
        graphs = self.graphs

        def eager() -> Decoded:
            hidden = self.engine._forward(tokens, chunks)
            return Decoded(hidden, self.engine._sample(hidden, settings, mix))

        return Steps(eager, None if graphs is None else lambda: graphs(tokens, chunks, sampling, mix))

    def bytes_read(self, sequences: int, context: int) -> int:
        """Bytes that a decode step reads: weights, keys and values."""
        entries = self.multiplied_weights + sequences * context * self.shape.cache_entries
        return entries * self.policy.compute.itemsize

    def prefill(self, tokens: int, prompts: int) -> tuple[float, float]:
        """FLOP and seconds of a forward of `tokens` prompt tokens, in prompts of equal length."""
        length = tokens // prompts
        chunks = [Chunk(n * length, length, n * length, length) for n in range(prompts)]
        time = seconds(lambda: self.engine._forward([0] * tokens, chunks), self.rounds)
        pairs = prompts * length * (length + 1) / 2  # of a token and a token that it attends to
        attention_flop = 4 * self.shape.layers * self.shape.heads * self.shape.dim * pairs
        weights_flop = 2 * (self.multiplied_weights - self.head_weights) * tokens
        return weights_flop + attention_flop, time
