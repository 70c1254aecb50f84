"""Single forwards of the engine against what the device can do.

    OMP_NUM_THREADS=1 python -m benchmarks.roofline
    python -m benchmarks.roofline --model large --sequences 64 128 --contexts 2000 1000

A decode step reads all weights, and the keys and values of every sequence; a device that did nothing else
would take bytes / bandwidth for it. A prefill of many tokens is arithmetic: its limit is FLOP / (FLOP/s).
Both limits are measured in the same run, by a copy and a matrix product, or given by --bandwidth and
--tflops. Before that the attention of the arena is compared with float64, sequence by sequence. Medians of
--rounds; the last line is JSON.
"""

import argparse
import json
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.rollout import load
from benchmarks.runs import clock
from prompt_r1.agent import attention
from prompt_r1.agent.attention import Chunk, Ragged, choose_kernel, one_by_one
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.kv_cache import kv_shape
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.sampling import Sampling, draw

WORK = {"cpu": (1 << 28, 1024), "cuda": (1 << 31, 8192)}  # bytes of the copy, sides of the product


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The median time of some work, after one round that does not count."""
    work()
    times = []
    for _ in range(rounds):
        begin = clock()
        work()
        times.append(clock() - begin)
    return median(times)


def limits(device: torch.device, dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and FLOP a second of a product of random matrices."""
    size, side = WORK[device.type]
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * size / seconds(lambda: target.copy_(source), rounds)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return bandwidth, 2 * side**3 / seconds(lambda: a @ b, rounds)


def attention_error(policy: Policy) -> tuple[str, float]:
    """The kernel that the engine takes here, and its largest difference from float64, sequence by sequence:
    prompts and single tokens of mixed lengths, whose places in the arena are in no order.
    """
    _, kv_heads, dim = kv_shape(policy)
    heads, device, dtype = policy.model.config.num_attention_heads, policy.device, policy.compute
    kernel = choose_kernel(device, dtype, heads, kv_heads, dim)
    keys, values = (torch.randn(kv_heads, 6000, dim, device=device, dtype=dtype) for _ in range(2))
    mixed = [Chunk(0, 1, 4000, 1999), Chunk(1, 300, 0, 300), Chunk(301, 1, 3000, 1), Chunk(302, 70, 500, 900)]
    single = [Chunk(column, 1, 5200 - 700 * column, 690 - 80 * column) for column in range(8)]
    worst = 0.0
    for chunks in (mixed, single):
        count = sum(chunk.count for chunk in chunks)
        query = torch.randn(count, heads, dim, device=device, dtype=dtype)
        ragged = Ragged([], [], chunks, device, kernel)
        exact = one_by_one(query.double(), keys.double(), values.double(), ragged, None)
        worst = max(worst, float((kernel(query, keys, values, ragged, None) - exact).abs().max()))
    return kernel.__name__, worst


class Bench:
    """Forwards as an engine makes them, without games: its cache holds random keys and values."""

    def __init__(self, policy: Policy, *, rows: int, longest: int, rounds: int) -> None:
        self.policy, self.rounds = policy, rounds
        self.engine = Engine(policy, stop_ids=frozenset(), max_tokens=longest, kv_tokens=rows)
        self.engine._allocate()
        self.recorded = self.engine._graphs
        assert self.engine._arena is not None
        for cache in (*self.engine._arena.keys, *self.engine._arena.values):
            cache.normal_()
        config = policy.model.config
        self.layers, kv_heads, self.dim = kv_shape(policy)
        self.heads = config.num_attention_heads
        self.token_bytes = 2 * self.layers * kv_heads * self.dim * policy.compute.itemsize
        head, embedding = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
        self.head = head.weight.numel()
        apart = 0 if head.weight is embedding.weight else embedding.weight.numel()
        # A step looks up a few rows of the embedding; it multiplies with all else.
        self.products = sum(weight.numel() for weight in policy.model.parameters()) - apart

    def decode(self, sequences: int, context: int) -> dict[str, object]:
        """A step of so many sequences, each with so many tokens, sampling included."""
        chunks = [Chunk(n, 1, n * (context + 1), context + 1) for n in range(sequences)]
        ids, ways = [0] * sequences, {"eager": None, "graphs": self.recorded}
        times = {}
        for name, graphs in ways.items():
            if name == "eager" or graphs is not None:
                self.engine._graphs = graphs
                times[name] = seconds(lambda: self._sample(self.engine._forward(ids, chunks)), self.rounds)
        best = min(times.values())
        recorded = self.recorded is not None and not self.recorded.broken
        return {
            "sequences": sequences,
            "context": context,
            "bytes": self.products * self.policy.compute.itemsize + sequences * context * self.token_bytes,
            "seconds": best,
            "tokens_per_s": round(sequences / best),
            "graphs_vs_eager": round(times["eager"] / times["graphs"], 2) if recorded else None,
        }

    def _sample(self, hidden: Tensor) -> list[int]:
        logits = self.policy.logits(hidden)
        return draw(logits, [Sampling()] * len(logits), [0.5] * len(logits)).tokens.tolist()

    def prefill(self, tokens: int, prompts: int) -> dict[str, float]:
        """A forward of so many prompt tokens, in prompts of the same length."""
        length = tokens // prompts
        chunks = [Chunk(n * length, length, n * length, length) for n in range(prompts)]
        ids, self.engine._graphs = [0] * tokens, None
        time = seconds(lambda: self.engine._forward(ids, chunks), self.rounds)
        pairs = prompts * length * (length + 1) / 2  # of a token and one that it sees
        attended = 4 * self.layers * self.heads * self.dim * pairs
        return {"flop": 2 * (self.products - self.head) * tokens + attended, "seconds": time}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("small", "large"), default="small",
                        help="7 M random weights in float32, or of Qwen3-4B's shape in bfloat16")  # fmt: skip
    parser.add_argument("--sequences", type=int, nargs="+", default=[22, 40], metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", default=[900, 900], metavar="TOKENS")
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS", help="as suits the device")
    parser.add_argument("--bandwidth", type=float, default=0.0, metavar="GB/S", help="of the data sheet")
    parser.add_argument("--tflops", type=float, default=0.0, metavar="TFLOP/S", help="of the data sheet")
    parser.add_argument("--rounds", type=int, default=9)
    choice = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention.register()
    model = load(choice.model, attention.NAME, device)
    policy = Policy(model, compute=model.dtype)
    bandwidth, flops = limits(device, model.dtype, choice.rounds)
    print(f"{bandwidth / 1e9:.1f} GB/s copied, {flops / 1e12:.3f} TFLOP/s of a product in {model.dtype}")
    bandwidth, flops = choice.bandwidth * 1e9 or bandwidth, choice.tflops * 1e12 or flops
    kernel, error = attention_error(policy)
    print(f"attention: {kernel}, at most {error:.1e} from float64")
    settings = list(zip(choice.sequences, choice.contexts, strict=True))
    tokens = choice.prefill or (8192 if device.type == "cuda" else 512)
    rows = max(tokens, *(sequences * (context + 1) for sequences, context in settings))
    longest = max(tokens, *(context + 1 for context in choice.contexts))
    bench = Bench(policy, rows=rows, longest=longest, rounds=choice.rounds)
    steps = [bench.decode(sequences, context) for sequences, context in settings]
    for step in steps:
        step["roofline"] = round(step["bytes"] / bandwidth / step["seconds"], 3)
        print(f"decode {step['sequences']} × {step['context']}: {1e3 * step['seconds']:.2f} ms, "
              f"{step['bytes'] / 1e6:.0f} MB, {step['roofline']:.0%} of the roofline")  # fmt: skip
    prompt = bench.prefill(tokens, prompts=8)
    used = prompt["flop"] / flops / prompt["seconds"]
    print(f"prefill {tokens}: {1e3 * prompt['seconds']:.2f} ms, {prompt['flop'] / 1e9:.0f} GFLOP, {used:.0%}")
    print(json.dumps({
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "model": choice.model, "kernel": kernel, "attention_error": error,
        "bandwidth": bandwidth, "flops": flops, "decode": steps, "prefill_used": round(used, 3),
        "torch": torch.__version__, "threads": torch.get_num_threads(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
