"""Single forwards of the engine compared with the limits of the device.

    OMP_NUM_THREADS=1 python -m benchmarks.roofline
    python -m benchmarks.roofline --model large --sequences 64 128 --contexts 2000 1000

A decode step reads all weights, and the keys and values of every sequence: it takes at least bytes /
bandwidth. A prefill of many tokens is limited by arithmetic: it takes at least FLOP / (FLOP/s). Both limits
are measured in the same run, by a copy and a matrix product, or given by --bandwidth and --tflops. First, the
engine's decode kernel is compared with float64 attention, sequence by sequence. The times are medians of
--rounds; the last line is JSON.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch

from benchmarks.rollout import load
from benchmarks.runs import clock
from prompt_r1.agent import attention
from prompt_r1.agent.cuda_graphs import Decoded, Record
from prompt_r1.agent.decode_kernels import Chunk, RaggedBatch, choose_kernel, one_by_one
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.policy import Policy, attention_shape
from prompt_r1.agent.sampling import Sampling, SamplingMix, settings_row

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}  # of the product of square matrices


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The median time of `work`, after a warm-up round."""
    work()
    times = []
    for _ in range(rounds):
        start = clock()
        work()
        times.append(clock() - start)
    return median(times)


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
    kernel = choose_kernel(device, dtype, shape.heads, shape.kv_heads, shape.dim)
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
        batch = RaggedBatch([], [], chunks, device, kernel)
        scale = query.shape[-1] ** -0.5
        exact = one_by_one(query.double(), keys.double(), values.double(), batch, scale)
        error = (kernel(query, keys, values, batch, scale) - exact).abs().max()
        worst = max(worst, float(error))
    return kernel.__name__, worst


@dataclass(frozen=True)
class DecodeStep:
    """A measured decode step; its fields are those of the JSON line."""

    sequences: int
    context: int  # tokens of each sequence
    bytes: int  # read from memory
    seconds: float
    tokens_per_s: int
    graphs_vs_eager: float | None  # how many times faster CUDA graphs are


@dataclass(frozen=True)
class Prefill:
    """A measured prefill."""

    flop: float
    seconds: float


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

    def decode(self, sequences: int, context: int) -> DecodeStep:
        """Measure a decode step."""
        steps = self.steps(sequences, context)
        eager = best = seconds(lambda: steps.eager().drawn.tolist(), self.rounds)
        graphs_vs_eager = None
        if self.graphs is not None:
            recorded = steps.recorded
            with_graphs = seconds(lambda: recorded().drawn.tolist(), self.rounds)
            best = min(eager, with_graphs)
            if not self.graphs.broken:
                graphs_vs_eager = round(eager / with_graphs, 2)
        entries = self.multiplied_weights + sequences * context * self.shape.cache_entries
        return DecodeStep(
            sequences=sequences,
            context=context,
            bytes=entries * self.policy.compute.itemsize,
            seconds=best,
            tokens_per_s=round(sequences / best),
            graphs_vs_eager=graphs_vs_eager,
        )

    def prefill(self, tokens: int, prompts: int) -> Prefill:
        """Measure a forward of `tokens` prompt tokens, in prompts of equal length."""
        length = tokens // prompts
        chunks = [Chunk(n * length, length, n * length, length) for n in range(prompts)]
        time = seconds(lambda: self.engine._forward([0] * tokens, chunks), self.rounds)
        pairs = prompts * length * (length + 1) / 2  # of a token and a token that it attends to
        attention_flop = 4 * self.shape.layers * self.shape.heads * self.shape.dim * pairs
        weights_flop = 2 * (self.multiplied_weights - self.head_weights) * tokens
        return Prefill(weights_flop + attention_flop, time)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        choices=("small", "large"),
        default="small",
        help="random weights: 7 M in float32, or the shape of Qwen3-4B in bfloat16",
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[22, 40], metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", default=[900, 900], metavar="TOKENS")
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS", help="0: chosen for the device")
    parser.add_argument("--bandwidth", type=float, default=0.0, metavar="GB/S", help="0: measure it")
    parser.add_argument("--tflops", type=float, default=0.0, metavar="TFLOP/S", help="0: measure them")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Measure the limits, the kernel's error, decode steps and a prefill."""
    choice = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention.register()
    model = load(choice.model, attention.NAME, device)
    policy = Policy(model, compute=model.dtype)
    measured = measure_limits(device, model.dtype, choice.rounds)
    copied, multiplied = measured.bandwidth / 1e9, measured.flops / 1e12
    print(f"{copied:.1f} GB/s copied, {multiplied:.3f} TFLOP/s of a product in {model.dtype}")
    limits = Limits(
        bandwidth=choice.bandwidth * 1e9 or measured.bandwidth, flops=choice.tflops * 1e12 or measured.flops
    )
    kernel, error = attention_error(policy)
    print(f"attention: {kernel}, at most {error:.1e} from float64")
    settings = list(zip(choice.sequences, choice.contexts, strict=True))
    tokens = choice.prefill or (8192 if device.type == "cuda" else 512)
    rows = max(tokens, *(sequences * (context + 1) for sequences, context in settings))
    longest = max(tokens, *(context + 1 for context in choice.contexts))
    bench = Bench(policy, rows=rows, longest=longest, rounds=choice.rounds)
    steps: list[dict[str, object]] = []
    for sequences, context in settings:
        step = bench.decode(sequences, context)
        share = step.bytes / limits.bandwidth / step.seconds
        steps.append({**asdict(step), "roofline": round(share, 3)})
        print(
            f"decode {sequences} × {context}: {1e3 * step.seconds:.2f} ms, {step.bytes / 1e6:.0f} MB, "
            f"{share:.0%} of the roofline"
        )
    prefill = bench.prefill(tokens, prompts=8)
    used = prefill.flop / limits.flops / prefill.seconds
    print(f"prefill {tokens}: {1e3 * prefill.seconds:.2f} ms, {prefill.flop / 1e9:.0f} GFLOP, {used:.0%}")
    summary = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "model": choice.model,
        "kernel": kernel,
        "attention_error": error,
        "bandwidth": limits.bandwidth,
        "flops": limits.flops,
        "decode": steps,
        "prefill_used": round(used, 3),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
