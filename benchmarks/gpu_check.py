"""The first minutes on a new CUDA machine: what works, how fast, and a number for each.

    python -m benchmarks.gpu_check
    torchrun --nproc-per-node 8 -m benchmarks.gpu_check          # also the checks of several GPUs

At most 10 minutes. Every row is PASS, FAIL (wrong), SLOW (right, but below the limit that its note gives) or
SKIP (with the reason). A row that raises is FAIL with its error, and the others still run. Of several GPUs, a
row is that of the worst. Weights are random: the shape of Qwen3-4B on GPUs of more than 100 GB, of Qwen3-0.6B
on smaller ones, and a tiny one on a CPU. The last line is JSON; paste it into an issue ("A run on GPUs").
With several GPUs a first version of it comes before the rows in which they work together: if one of them
fails there, the others wait for it and are ended.
"""

import asyncio
import gc
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks import roofline
from benchmarks.runs import clock, memory
from benchmarks.update import random_games
from benchmarks.workload import VOCABULARY, small_model
from prompt_r1.agent import attention, packed_attention
from prompt_r1.agent.adapters import adapters_of, add_lora
from prompt_r1.agent.attention_choice import check_attention
from prompt_r1.agent.cuda_graphs import SIZES, TOLERANCE, Record
from prompt_r1.agent.decode_kernels import Chunk
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.fused_kernels import fuse
from prompt_r1.agent.kv_cache import affordable_rows
from prompt_r1.agent.packing import Group
from prompt_r1.agent.policy import Policy, attention_shape
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.fsdp import full_tensor
from prompt_r1.distributed.ranks import Ranks, make_mesh, start_ranks, stop_ranks
from prompt_r1.storage.checkpoint import Checkpoints, State
from prompt_r1.training.gap import NAME, Limit, limit_of
from prompt_r1.training.memory_estimate import Setup, shape_of, state_bytes, update_bytes
from prompt_r1.training.update import Update
from prompt_r1.types import ScoredGame
from prompt_r1.version import installed_version
from train import learn

PASS, SKIP, SLOW, FAIL = VERDICTS = ("PASS", "SKIP", "SLOW", "FAIL")  # from good to bad
TIME_LIMIT = 540.0  # seconds after which no further row begins
COLLECTIVE_TIMEOUT = 120.0  # seconds that a rank waits for another
# Datasheets: bytes/s of the memory, FLOP/s of dense bfloat16 products. Names of slices of a GPU are longer.
DATASHEETS = {
    "NVIDIA A100-SXM4-40GB": (1.555e12, 312e12),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12),
    "NVIDIA A100-PCIE-40GB": (1.555e12, 312e12),
    "NVIDIA A100 80GB PCIe": (1.935e12, 312e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA H200": (4.8e12, 989e12),
}
# Qwen3-0.6B and Qwen3-4B: hidden, layers, heads, intermediate.
SHAPES = {"Qwen3-0.6B": (1024, 28, 16, 3072), "Qwen3-4B": (2560, 36, 32, 9728)}


class Skipped(Exception):
    """A row that makes no sense here, and why."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    verdict: str
    value: float | None  # its number; None if there is none
    unit: str
    note: str


@dataclass(frozen=True)
class Found:
    """What a check measured."""

    value: float | None
    unit: str = ""
    note: str = ""
    verdict: str = PASS


def at_least(value: float, limit: float, unit: str, note: str) -> Found:
    """PASS from a limit on, SLOW below."""
    return Found(value, unit, f"{note}; at least {limit:g} expected", PASS if value >= limit else SLOW)


def at_most(value: float, limit: float, unit: str, note: str) -> Found:
    """PASS up to a limit, FAIL above, and for NaN."""
    return Found(value, unit, f"{note}; at most {limit:g} allowed", PASS if value <= limit else FAIL)


@dataclass
class Machine:
    """The device, its models, and what earlier rows measured."""

    ranks: Ranks
    record: Record | None = None  # of decode steps; None: as CUDA graphs, on GPUs
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    @cached_property
    def model_name(self) -> str:
        if not self.cuda:
            return "tiny"
        total = torch.cuda.get_device_properties(self.device).total_memory
        return "Qwen3-4B" if total > 100e9 else "Qwen3-0.6B"

    def model(self, dtype: torch.dtype) -> PreTrainedModel:
        """A model with random weights, the same each time."""
        attention.register()
        if self.model_name == "tiny":
            return small_model(attention=attention.NAME).to(dtype)
        hidden, layers, heads, intermediate = SHAPES[self.model_name]
        config = Qwen3Config(
            vocab_size=151_936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=8, head_dim=128, intermediate_size=intermediate, tie_word_embeddings=True,
            max_position_embeddings=40_960, attn_implementation=attention.NAME, bos_token_id=None,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[self.device]), self.device:
            torch.manual_seed(0)
            return Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()

    @cached_property
    def policy(self) -> Policy:
        """The weights that play."""
        return self.new_policy(self.dtype)

    def new_policy(self, weights: torch.dtype) -> Policy:
        """A policy with weights of this dtype and, on a GPU, fused kernels as in training."""
        policy = Policy(self.model(weights), compute=self.dtype)
        if self.cuda:
            policy.fused = fuse(policy.model, self.device, self.dtype)
        return policy

    @cached_property
    def bench(self) -> roofline.Bench:
        """An engine whose cache is full of random numbers."""
        longest, rows = (4096, min(150_000, affordable_rows(self.policy))) if self.cuda else (512, 8_192)
        return roofline.Bench(self.policy, rows=rows, longest=longest, rounds=9, record=self.record)

    @cached_property
    def limits(self) -> roofline.Limits:
        return roofline.measure_limits(self.device, self.dtype, 5)

    @property
    def datasheet(self) -> tuple[float, float] | None:
        return DATASHEETS.get(torch.cuda.get_device_name(self.device)) if self.cuda else None

    def share(self, share: float, limit: float, note: str) -> Found:
        """A share of what the device can do, with a limit on GPUs only."""
        if self.cuda:
            return at_least(100 * share, 100 * limit, "%", note)
        return Found(100 * share, "%", note)

    def games(self, questions: int, vocabulary: int) -> list[ScoredGame]:
        """Random games to train on; on a CPU only three of them."""
        games = random_games(questions, vocabulary)
        return games if self.cuda else games[:3]

    def free(self) -> None:
        """Free what earlier rows hold."""
        for name in ("policy", "bench"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


# Versions, memory, limits


def versions(machine: Machine) -> Found:
    packages = ("torch", "transformers", "flash-attn", "triton")
    parts = [f"{name} {installed_version(name) or 'absent'}" for name in packages]
    if machine.cuda:
        parts += [f"CUDA {torch.version.cuda}", torch.cuda.get_device_name(machine.device)]
    return Found(machine.ranks.count, "ranks", ", ".join([*parts, f"model {machine.model_name}"]))


def free_memory(machine: Machine) -> Found:
    if not machine.cuda:
        raise Skipped("no GPU")
    free, total = torch.cuda.mem_get_info(machine.device)
    return Found(free / 1e9, "GB", f"of {total / 1e9:.0f}", PASS if free > 0.9 * total else SLOW)


def bandwidth(machine: Machine) -> Found:
    found = machine.limits.bandwidth
    machine.measured["bandwidth"] = found
    if machine.datasheet is None:
        return Found(found / 1e9, "GB/s", "copy; no datasheet of this device")
    return at_least(found / 1e9, 0.75 * machine.datasheet[0] / 1e9, "GB/s", "copy")


def matrix_product(machine: Machine) -> Found:
    found = machine.limits.flops
    machine.measured["flops"] = found
    if machine.datasheet is None:
        return Found(found / 1e12, "TFLOP/s", f"{machine.dtype}; no datasheet of this device")
    return at_least(found / 1e12, 0.6 * machine.datasheet[1] / 1e12, "TFLOP/s", f"{machine.dtype}")


# Attention


def kernels(machine: Machine) -> Found:
    line = check_attention(machine.policy, allow_slow=True)
    slow = "one_by_one" in line or "game_by_game" in line
    fused = ", ".join(machine.policy.fused) or "none"
    shared = "shared" if machine.policy.can_share_rows(machine.policy.decode_kernel()) else "copied"
    text = f"{line}; prompts of a group: {shared}; fused modules: {fused}"
    return Found(None, "", text, FAIL if slow and machine.cuda else PASS)


def arena_attention(machine: Machine) -> Found:
    kernel, error = roofline.attention_error(machine.policy)
    return at_most(error, 2e-2 if machine.cuda else 1e-5, "", f"{kernel} against float64")


def packed_attention_error(machine: Machine) -> Found:
    """The relative error of output and gradients, the largest of the four."""
    shape = attention_shape(machine.policy.model.config)
    attend = packed_attention.choose_attention(
        machine.device, machine.dtype, shape.heads, shape.kv_heads, shape.dim
    )
    groups = (Group(0, 300, (200, 450, 70)), Group(1020, 500, ()))
    torch.manual_seed(0)
    inputs = [
        torch.randn(heads, 1520, shape.dim, device=machine.device, dtype=machine.dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    ]
    found, exact = [], []
    for results, dtype, compute in (
        (found, machine.dtype, attend),
        (exact, torch.float64, packed_attention.game_by_game),
    ):
        *leaves, gradient = [rows.to(dtype, copy=True) for rows in inputs]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.enable_grad():
            out = compute(groups, *leaves, shape.dim**-0.5, packed_attention.PLAIN)
            results += [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    limit = 2e-2 if machine.cuda else 1e-5
    return at_most(max(errors), limit, "", f"{attend.__name__}, forward and backward, against float64")


# Decoding


@torch.inference_mode()
def graphs_of_every_size(machine: Machine) -> Found:
    bench = machine.bench
    if bench.graphs is None:
        raise Skipped("the chosen attention cannot be recorded")
    before = _held(machine)
    context = bench.engine.max_tokens // 16
    for size in SIZES:
        bench.steps(size, min(context, bench.engine.kv_tokens // size - 1)).recorded()
        if bench.graphs.broken:
            return Found(size, "rows", "could not be recorded, or its result differs", FAIL)
    return Found(len(SIZES), "sizes", f"memory grew by {_held(machine) - before:.0f} MB")


def _held(machine: Machine) -> float:
    """MB that the process holds, those of graphs included."""
    if not machine.cuda:
        return memory()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(machine.device) / 1e6


@torch.inference_mode()
def replay_after_new_weights(machine: Machine) -> Found:
    steps = machine.bench.steps(8, 100)
    if steps.recorded is None or machine.bench.graphs.broken:
        raise Skipped("nothing is recorded")
    before = steps.recorded().hidden.float().clone()
    for weight in machine.policy.parameters():
        weight.mul_(1.05)
    found = steps.recorded().hidden.float().clone()
    expected = steps.eager().hidden.float()
    for weight in machine.policy.parameters():
        weight.div_(1.05)
    if torch.equal(before, found):
        return Found(0.0, "", "the replay ignores new weights", FAIL)
    difference = float((found - expected).norm() / expected.norm())
    return at_most(difference, TOLERANCE, "", "replay against the direct step after a change of weights")


def gap(machine: Machine) -> Found:
    """The engine's log-probabilities of games, against a forward over them."""
    return _gap(machine.policy, limit_of(machine.dtype).alarm)


def gap_in_16_bits(machine: Machine) -> Found:
    if machine.cuda:
        raise Skipped("the row above is in 16 bits")
    policy = Policy(machine.model(torch.bfloat16), compute=torch.bfloat16)
    return _gap(policy, limit_of(torch.bfloat16).alarm)


def gap_with_adapters(machine: Machine) -> Found:
    """The same with adapters beside the weights, as `--adapter-rank` plays and learns."""
    policy = machine.new_policy(machine.dtype)
    add_lora(policy.model, rank=8, alpha=32)
    for layer in adapters_of(policy.model).values():
        torch.nn.init.normal_(layer.b, std=0.01)
    policy.checkpoint_activations()
    return _gap(policy, limit_of(machine.dtype).alarm)


def _gap(policy: Policy, limit: float) -> Found:
    vocabulary = policy.model.config.vocab_size
    rng = random.Random(0)
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(20, 60))] for _ in range(8)]
    engine = Engine(policy, stop_ids=frozenset(), max_tokens=128, kv_tokens=2048)

    async def play() -> list[tuple[list[int], list[float]]]:
        games = [engine.generate(prompt, max_new=30, seed=str(n)) for n, prompt in enumerate(prompts)]
        return [(done.tokens, done.logprobs) for done in await asyncio.gather(*games)]

    gaps = []
    with torch.inference_mode():
        for prompt, (tokens, logprobs) in zip(prompts, asyncio.run(play()), strict=True):
            row = torch.tensor([prompt + tokens], device=policy.device)
            positions = torch.arange(row.shape[1], device=policy.device)[None]
            hidden = policy.hidden_states(row, position_ids=positions)[0, len(prompt) - 1 : -1]
            scores = policy.logits(hidden).log_softmax(-1)
            found = scores.gather(1, row[0, len(prompt) :, None])[:, 0].cpu()
            gaps += (found - torch.tensor(logprobs)).abs().tolist()
    mean = sum(gaps) / len(gaps)
    return at_most(mean, limit, "nats", f"mean of {len(gaps)} tokens, at most {max(gaps):.2g}")


def decode(sequences: int) -> Callable[[Machine], Found]:
    """The check of a decode step with this many sequences."""

    @torch.inference_mode()
    def check(machine: Machine) -> Found:
        bench = machine.bench
        context = min(1000, bench.engine.kv_tokens // sequences - 1) if machine.cuda else 30
        step = bench.decode(sequences, context)
        steps = bench.steps(sequences, context)
        run = steps.recorded or steps.eager
        host = []
        for _ in range(9):
            start = clock()
            decoded = run()
            host.append(time.perf_counter() - start)  # the device may still be working
            decoded.drawn.tolist()
        machine.measured[f"decode_{sequences}"] = step.seconds
        share = step.bytes / machine.limits.bandwidth / step.seconds
        graphs = f"; with graphs {step.graphs_vs_eager} × as fast" if step.graphs_vs_eager else ""
        note = (
            f"of the roofline with {context} tokens each; {1e3 * step.seconds:.2f} ms, host until it waits "
            f"{1e3 * median(host):.2f}; {_waits(machine, run)}{graphs}"
        )
        return machine.share(share, 0.5, note)

    return check


def _waits(machine: Machine, run: Callable[[], object]) -> str:
    """How often a step waits for the device, counted by torch's debug mode."""
    if not machine.cuda:
        return "waits not counted without a GPU"
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run().drawn.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"{sum('synchroniz' in str(warning.message) for warning in caught)} waits"


@torch.inference_mode()
def mixed_step(machine: Machine) -> Found:
    """Prompts beside sequences that decode, in one forward."""
    bench = machine.bench
    prompt, decoding, longest = (2048, 32, 1000) if machine.cuda else (64, 4, 30)
    context = min(longest, (bench.engine.kv_tokens - prompt) // decoding - 1)
    if context < 1:
        raise Skipped(f"the memory has room for {bench.engine.kv_tokens} tokens")
    chunks = [Chunk(n, 1, n * (context + 1), context + 1) for n in range(decoding)]
    chunks.append(Chunk(decoding, prompt, decoding * (context + 1), prompt))
    tokens = [0] * (decoding + prompt)
    time_taken = roofline.seconds(lambda: bench.engine._forward(tokens, chunks), 5)
    note = f"{prompt} prompt tokens beside {decoding} that decode, with {context} tokens each"
    return Found(1e3 * time_taken, "ms", note)


@torch.inference_mode()
def prefill(machine: Machine) -> Found:
    tokens = min(8192 if machine.cuda else 512, machine.bench.engine.kv_tokens // 8 * 8)
    done = machine.bench.prefill(tokens, prompts=8)
    machine.measured["prefill_token"] = done.seconds / tokens
    note = f"{tokens} tokens in {1e3 * done.seconds:.1f} ms; share of the product's speed"
    return machine.share(done.flop / done.seconds / machine.limits.flops, 0.4, note)


def out_of_memory(machine: Machine) -> Found:
    """One forward runs out of memory: the engine must play on, and sample the same tokens."""
    policy = machine.policy

    async def play(engine: Engine) -> list[list[int]]:
        games = [engine.generate([n + 1, 2, 3], max_new=8, seed=str(n)) for n in range(16)]
        return [done.tokens for done in await asyncio.gather(*games)]

    def engine() -> Engine:
        return Engine(policy, stop_ids=frozenset(), max_tokens=64, kv_tokens=2048)

    calls = []

    def run_out(*_: object) -> None:
        calls.append(None)
        if len(calls) == 3:
            if machine.cuda:
                torch.empty(1 << 50, dtype=torch.uint8, device=machine.device)  # raises it
            raise torch.OutOfMemoryError("as if memory had run out")

    expected = asyncio.run(play(engine()))
    handle = policy.model.base_model.register_forward_pre_hook(run_out)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = asyncio.run(play(engine()))
    finally:
        handle.remove()
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    # In 16 bits, another batch size may sample other tokens.
    enough = equal == 16 if machine.dtype == torch.float32 else True
    return Found(equal, "of 16 games", "have the same tokens; all were finished", PASS if enough else FAIL)


# The update


def update(machine: Machine) -> Found:
    """One optimiser step in float32 weights and the compute dtype: MFU, and its peak against --dry-run."""
    limit = 16_384 if machine.cuda else 4_096
    shape = shape_of(machine.policy.model.config)
    setup = Setup(shards=1, full=True, width=machine.dtype.itemsize, reference=False)
    needed = sum([*state_bytes(shape, setup).values(), *update_bytes(shape, setup, tokens=limit).values()])
    machine.free()
    if machine.cuda and needed > torch.cuda.mem_get_info(machine.device)[0]:
        raise Skipped(f"it needs {needed / 1e9:.1f} GB, says --dry-run")
    learner = machine.new_policy(torch.float32)
    learner.checkpoint_activations()
    # The copy that plays is allocated too, as in training.
    playing = learner if machine.dtype == torch.float32 else machine.policy
    updater = _updater(learner, Ranks(0, 1, machine.device), limit)
    games = machine.games(6, _vocabulary(learner))
    learn(updater, [games], clip=0.2, kl_coef=0.0)  # allocates the moments
    memory(reset=True)
    start = clock()
    learn(updater, [games], clip=0.2, kl_coef=0.0)
    taken = clock() - start
    peak = 1e6 * memory()
    flop = _update_flop(games, learner)
    machine.measured["update_flops"] = flop / taken
    share = flop / taken / machine.limits.flops
    note = f"{taken:.2f} s; share of the product's speed"
    if machine.cuda:  # resident memory of a CPU process holds the libraries too
        note += f"; peak {peak / 1e9:.1f} GB, --dry-run says {needed / 1e9:.1f}"
        if peak > 1.1 * needed:
            return Found(100 * share, "%", f"{note}: the estimate is too small", FAIL)
    del playing
    return machine.share(share, 0.3, note)


def _updater(learner: Policy, ranks: Ranks, limit: int) -> Update:
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-6, fused=ranks.device.type == "cuda")
    return Update(
        learner,
        None,
        optimizer,
        ranks,
        grad_clip=1.0,
        token_mean=False,
        tokens_per_batch=limit,
        gap_limit=Limit(NAME, math.inf, math.inf),  # no engine played these games
    )


def _vocabulary(policy: Policy) -> int:
    return min(VOCABULARY, policy.model.config.vocab_size)


def _update_flop(games: list[ScoredGame], policy: Policy) -> float:
    """FLOP of a forward and a backward with recomputed activations: four forwards."""
    shape = attention_shape(policy.model.config)
    head = policy.model.get_output_embeddings().weight.numel()
    weights = sum(weight.numel() for weight in policy.model.parameters()) - head
    flop = 0.0
    openings: set[tuple[int, ...]] = set()
    for game in games:
        trajectory = game.trajectory
        length, opening = len(trajectory.tokens), tuple(trajectory.tokens[: trajectory.opening])
        columns = length if opening not in openings else length - len(opening)
        openings.add(opening)
        pairs = length * length / 2 - (length - columns) ** 2 / 2
        flop += 2 * weights * columns + 4 * shape.layers * shape.heads * shape.dim * pairs
        flop += 2 * head * sum(trajectory.sampled)
    return 4 * flop


# Several ranks


def sharded(mode: str, *, offload: bool = False) -> Callable[[Machine], Found]:
    """The check of the gradients of all ranks together against those of one process, in float32."""

    def learner(device: torch.device) -> Policy:
        return Policy(small_model(attention=attention.NAME).to(device), compute=torch.float32)

    def check(machine: Machine) -> Found:
        _, difference, seconds = _shard_and_learn(machine, mode, learner, offload=offload)
        note = f"norm of the gradient against one process, {seconds:.1f} s"
        return at_most(difference, 1e-4, "", note)

    return check


def sharded_as_in_training(machine: Machine) -> Found:
    """The same with all that training adds, and the copy of the weights that plays."""

    def learner(device: torch.device) -> Policy:
        policy = Policy(small_model(attention=attention.NAME).to(device), compute=machine.dtype)
        if machine.cuda:
            policy.fused = fuse(policy.model, device, machine.dtype)
        policy.checkpoint_activations()
        return policy

    many, difference, _ = _shard_and_learn(machine, "fsdp", learner)
    model = small_model(attention=attention.NAME).to(machine.device, machine.dtype)
    playing = Policy(model, compute=machine.dtype)
    playing.copy_weights_from(many)
    pairs = zip(playing.parameters(), many.parameters(), strict=True)
    copied = [torch.equal(mine, full_tensor(weight.detach()).to(mine.dtype)) for mine, weight in pairs]
    if not all(copied):
        return Found(difference, "", "the copy that plays has other weights", FAIL)
    note = f"norm of the gradient in {machine.dtype} against one process; the copy that plays is equal"
    return at_most(difference, 2e-2 if machine.dtype.itemsize == 2 else 1e-4, "", note)


def _shard_and_learn(
    machine: Machine, mode: str, learner: Callable[[torch.device], Policy], *, offload: bool = False
) -> tuple[Policy, float, float]:
    """A policy that has learned while sharded over all ranks, its error, and the seconds that it took.

    `learner` makes an unsharded policy on a device. The error is the relative difference of the gradient's
    norm from that of one process.
    """
    ranks = machine.ranks
    if ranks.count == 1:
        raise Skipped("start it with torchrun")
    machine.free()
    games = machine.games(2, VOCABULARY)
    expected = _gradient_norm(learner(machine.device), Ranks(0, 1, machine.device), games)
    many = learner(torch.device("cpu") if offload else machine.device)
    mesh = make_mesh(mode, ranks.count, machine.device, timeout=ranks.timeout)
    many.shard(mesh, machine.device, offload=offload)
    share = Ranks(ranks.rank, ranks.count, machine.device, mesh, ranks.monitored_group, ranks.timeout)
    start = clock()
    found = _gradient_norm(many, share, games[ranks.rank :: ranks.count])
    return many, abs(found - expected) / expected, clock() - start


def _gradient_norm(policy: Policy, ranks: Ranks, games: list[ScoredGame]) -> float:
    return learn(_updater(policy, ranks, 6_144), [games], clip=0.2, kl_coef=0.0)["grad_norm"]


def checkpoint(machine: Machine) -> Found:
    """Write a checkpoint on all ranks, and read it in one process."""
    machine.free()
    ranks = machine.ranks
    config = TrainConfig(save_every=1)
    with ExitStack() as stack:
        folder = ""
        if ranks.first:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")))
        folder = ranks.from_first(lambda: folder)
        if not all(ranks.gather(Path(folder).is_dir())):
            raise Skipped("TMPDIR must be a folder that all nodes see")
        policy = Policy(small_model(attention=attention.NAME).to(machine.device), compute=torch.float32)
        mesh = make_mesh("fsdp", ranks.count, machine.device) if ranks.count > 1 else None
        if mesh is not None:
            policy.shard(mesh, machine.device, offload=False)
        share = Ranks(ranks.rank, ranks.count, machine.device, mesh, ranks.monitored_group, ranks.timeout)
        updater = _updater(policy, share, 6_144)
        learn(updater, [machine.games(1, VOCABULARY)[ranks.rank :: ranks.count]], clip=0.2, kl_coef=0.0)
        start = clock()
        saved = Checkpoints(Path(folder), policy, updater.optimizer, config, share, say=str, background=False)
        failure = saved.save(State(step=1))
        taken = clock() - start
        if failure:
            return Found(taken, "s", failure, FAIL)
        written = sum_of_squares(policy)
        read = ranks.from_first(lambda: _read_alone(folder, machine.device))
    note = f"written by {ranks.count} in {taken:.1f} s, read by one process"
    return at_most(abs(read.sum / written - 1), 1e-9, "", f"{note}{read.error}")


@dataclass(frozen=True)
class Read:
    """A checkpoint as another process read it."""

    sum: float  # of the squared weights; NaN if it could not be read
    error: str = ""


def _read_alone(folder: str, device: torch.device) -> Read:
    """Read a checkpoint in a process of its own, without ranks."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--read-checkpoint", folder, str(device)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return Read(math.nan, f": {error}")
    if done.returncode or not done.stdout:
        return Read(math.nan, f": {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return Read(float(done.stdout.split()[-1]))


def read_checkpoint(folder: str, device: str) -> None:
    """Print the sum of the squared weights of a checkpoint."""
    ranks = Ranks(0, 1, torch.device(device))
    attention.register()
    policy = Policy(small_model(attention=attention.NAME).to(ranks.device), compute=torch.float32)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.zero_()
    updater = _updater(policy, ranks, 6_144)
    config = TrainConfig(save_every=1)
    saved = Checkpoints(Path(folder), policy, updater.optimizer, config, ranks, say=str, background=False)
    newest = saved.newest()
    assert newest is not None, f"no valid checkpoint in {folder}"
    saved.load(newest)
    print(sum_of_squares(policy))


def sum_of_squares(policy: Policy) -> float:
    """Of all weights, sharded or not. Called by every rank."""
    return sum(float(full_tensor(weight.detach()).double().square().sum()) for weight in policy.parameters())


# A step, projected


def projected_step(machine: Machine) -> Found:
    """A step of 640 games of 1,830 tokens, 640 of them sampled, from the rows above; without waiting."""
    measured, ranks = machine.measured, machine.ranks.count
    needed = {"decode_64", "prefill_token", "update_flops"} - set(measured)
    if needed:
        raise Skipped(f"not measured above: {', '.join(sorted(needed))}")
    rollout = 410_000 / ranks / 64 * measured["decode_64"] + 440_000 / ranks * measured["prefill_token"]
    # 42.7 PFLOP for Qwen3-4B (benchmarks.cluster), by weights for other models; ranks wait 12 % of the time.
    weights = {"Qwen3-4B": 4.02e9, "Qwen3-0.6B": 0.6e9, "tiny": 7e6}[machine.model_name]
    learning = 42.7e15 * weights / 4.02e9 / ranks / measured["update_flops"] / 0.88
    seconds = rollout + learning
    note = f"rollout {rollout:.0f}, update {learning:.0f}; a run of 320 steps {320 * seconds / 3600:.1f} h"
    return Found(seconds, "s", note)


FIRST_TOGETHER = "fsdp"  # the first row in which the ranks work together
CHECKS: dict[str, Callable[[Machine], Found]] = {
    "versions": versions,
    "free memory": free_memory,
    "bandwidth": bandwidth,
    "matrix product": matrix_product,
    "kernels": kernels,
    "attention over the cache": arena_attention,
    "attention of the update": packed_attention_error,
    "graphs of every size": graphs_of_every_size,
    "replay with new weights": replay_after_new_weights,
    "gap engine - policy": gap,
    "gap in 16 bits": gap_in_16_bits,
    "gap with adapters": gap_with_adapters,
    **{f"decode {sequences}": decode(sequences) for sequences in (32, 64, 128, 256)},
    "mixed step": mixed_step,
    "prefill": prefill,
    "out of memory": out_of_memory,
    "update": update,
    FIRST_TOGETHER: sharded("fsdp"),
    "hsdp": sharded("hsdp"),
    "fsdp, offloaded": sharded("fsdp", offload=True),
    "fsdp, as in training": sharded_as_in_training,
    "checkpoint": checkpoint,
    "projected step": projected_step,
}


def run_check(name: str, check: Callable[[Machine], Found], machine: Machine) -> Row:
    """A line of the table, whatever the check does."""
    try:
        found = check(machine)
    except Skipped as reason:
        return Row(name, SKIP, None, "", str(reason))
    except Exception as error:  # a row must not end the others
        first_line = str(error).strip().partition("\n")[0]
        return Row(name, FAIL, None, "", f"{type(error).__name__}: {first_line}")
    return Row(name, found.verdict, found.value, found.unit, found.note.strip("; "))


def run_checks(machine: Machine, checks: dict[str, Callable[[Machine], Found]], end: float) -> Iterator[Row]:
    """The lines of the table; after the time `end` the checks are skipped. Called by every rank."""
    late = False
    for name, check in checks.items():
        own = Row(name, SKIP, None, "", "no time left") if late else run_check(name, check, machine)
        # They travel through CPU memory: after an illegal access, every call of CUDA would raise.
        found = machine.ranks.gather((own, time.monotonic() > end))
        late = any(is_late for _, is_late in found)
        yield worst([row for row, _ in found])


def worst(rows: Sequence[Row]) -> Row:
    """Of the ranks' rows of a check, the first of the worst verdict."""
    verdicts = [row.verdict for row in rows]
    verdict = max(verdicts, key=VERDICTS.index)
    rank, count = verdicts.index(verdict), verdicts.count(verdict)
    if count == len(rows):
        return rows[0]
    return replace(rows[rank], note=f"on {count} of {len(rows)} ranks, first rank {rank}: {rows[rank].note}")


def main() -> None:
    """Run all checks, and print the table and the JSON line."""
    if sys.argv[1:2] == ["--read-checkpoint"]:
        read_checkpoint(sys.argv[2], sys.argv[3])
        return
    if sys.argv[1:]:
        print((__doc__ or "").strip())
        return
    began = time.monotonic()
    parallel = "ddp" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else "none"
    ranks = start_ranks("auto", parallel, timeout=COLLECTIVE_TIMEOUT)
    attention.register()
    rows: list[Row] = []

    def print_json() -> None:
        seconds = round(time.monotonic() - began)
        print(json.dumps({"seconds": seconds, "rows": [asdict(row) for row in rows]}), flush=True)

    for row in run_checks(Machine(ranks), CHECKS, began + TIME_LIMIT):
        rows.append(row)
        if ranks.first:
            value = "" if row.value is None else f"{row.value:.4g}"
            print(f"{row.verdict:4}  {row.name:24}  {value:>9} {row.unit:11}  {row.note}", flush=True)
            if ranks.count > 1 and len(rows) == list(CHECKS).index(FIRST_TOGETHER):
                print_json()
    if ranks.first:
        print_json()
    stop_ranks(ranks)


if __name__ == "__main__":
    main()
