"""The first five minutes on a CUDA machine: is it right, and how fast is it?

    python -m benchmarks.gpu_check                               # on a CPU the same code checks a tiny model
    torchrun --nproc-per-node 8 --module benchmarks.gpu_check    # also the network between the ranks

It prints a line for each check: PASS or FAIL (a wrong result, or an error), and what was measured. The
weights are random, in the shape of Qwen3-4B on GPUs of more than 60 GB, and of Qwen3-0.6B on smaller GPUs.
The exit code is 1 if a check failed.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.measuring import clock, memory
from benchmarks.workload import CPU, learn_from, plan, random_games, random_model
from prompt_r1.engine.engine import Engine
from prompt_r1.engine.kv_cache import BLOCK_SIZE, BlockPool, TokenSequence, bytes_of_a_token, can_use_flash
from prompt_r1.engine.model_check import check_model
from prompt_r1.engine.paged_attention import PagedBatch, _flash, _sequence_by_sequence
from prompt_r1.model import attention
from prompt_r1.model.distributed import Ranks, start_ranks, stop_ranks
from prompt_r1.model.machine import memory_left, pick_device
from prompt_r1.model.packing import pack
from prompt_r1.model.policy import Policy
from prompt_r1.programs.launcher import launcher_number
from prompt_r1.types import Completion, Question, Trajectory

# The largest mean difference in nats between log-probabilities that rounding explains.
GAP_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@dataclass
class Machine:
    """What the first checks measured, for the later ones."""

    ranks: Ranks
    flops: float = 0.0  # per second, of a large matrix product
    bandwidth: float = 0.0  # bytes per second that a copy reads and writes

    @property
    def on_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"


def random_policy(machine: Machine) -> Policy:
    """A policy with random weights, as large as the device allows."""
    attention.register()
    if not machine.on_gpu:
        return Policy(random_model(attention=attention.NAME), compute_dtype=torch.float32)
    device = machine.ranks.device
    large = torch.cuda.get_device_properties(device).total_memory > 60e9
    shape = "Qwen3-4B" if large else "Qwen3-0.6B"
    model = random_model(shape, attention=attention.NAME, dtype=torch.bfloat16, device=device)
    return Policy(model, compute_dtype=torch.bfloat16)


def header(machine: Machine) -> str:
    """What there is, and which paths it takes."""
    device = machine.ranks.device
    local = launcher_number("LOCAL_WORLD_SIZE", default=1)
    host = (
        f"{len(os.sched_getaffinity(0)) / local:.0f} cores and {memory_left(CPU) / 1e9:.0f} GB for each rank"
    )
    if not machine.on_gpu:
        return f"CPU, torch {torch.__version__}, {host}"
    major, minor = torch.cuda.get_device_capability(device)
    flash = can_use_flash(device, torch.bfloat16, head_dim=128)
    return (
        f"{torch.cuda.get_device_name(device)} (SM {major}.{minor}), torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, {memory_left(device) / 1e9:.0f} GB free, {machine.ranks.count} ranks, "
        f"{host}; FlashAttention {'yes' if flash else 'no'}"
    )


def seconds_of(work: Callable[[], object], *, times: int) -> float:
    """The mean seconds of one call, after a first one that is not counted."""
    work()
    start = clock()
    for _ in range(times):
        work()
    return (clock() - start) / times


def machine_speed(policy: Policy, machine: Machine) -> str:
    """Measure a large matrix product, a copy, and the launch of a kernel that does almost nothing."""
    size = 8192 if machine.on_gpu else 256
    matrix = torch.randn(size, size, device=policy.device, dtype=policy.compute_dtype)
    machine.flops = 2 * size**3 / seconds_of(lambda: matrix @ matrix, times=10)
    source = torch.empty(2**30 if machine.on_gpu else 2**24, dtype=torch.uint8, device=policy.device)
    target = torch.empty_like(source)
    machine.bandwidth = 2 * len(source) / seconds_of(lambda: target.copy_(source), times=10)
    one = torch.zeros(1, device=policy.device)
    launch = seconds_of(lambda: one.add_(1), times=1000)
    return (
        f"{machine.flops / 1e12:,.3g} TFLOP/s, {machine.bandwidth / 1e9:,.3g} GB/s, "
        f"a launch {launch * 1e6:.1f} µs"
    )


def paged_attention(policy: Policy, machine: Machine) -> str:
    """Compare FlashAttention with a block table and SDPA, over head sizes, groups, windows and blocks.

    Alone, a sequence must have the same bits as in the batch: `num_splits=1` guards that in torch 2.13.
    """
    lengths = (8192, 1500, 513, 256, 40, 1) if machine.on_gpu else (600, 513, 256, 40, 1)
    worst = 0.0
    for dim in (64, 128, 256):
        for group in (1, 4, 8):
            config = Qwen3Config(
                vocab_size=8,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=8,
                num_key_value_heads=8 // group,
                head_dim=dim,
            )
            model = Qwen3ForCausalLM(config).to(policy.device)
            shaped = Policy(model, compute_dtype=policy.compute_dtype)
            for counts in ([1] * len(lengths), [min(length, 300) for length in lengths]):
                for window in (None, 100):
                    worst = max(worst, _attention_error(shaped, lengths, counts, window))
    assert worst < 2e-2, f"the outputs differ by up to {worst:.2g}"
    return f"outputs differ by at most {worst:.2g}; alone and in a batch bit-equal"


def _attention_error(
    policy: Policy, lengths: tuple[int, ...], counts: list[int], window: int | None
) -> float:
    """The largest difference from SDPA over random keys. Raises if a batch changes a sequence."""
    torch.manual_seed(0)
    blocks = sum(length // BLOCK_SIZE["cuda"] + 1 for length in lengths)
    pool = BlockPool(policy, blocks=blocks, block_size=BLOCK_SIZE["cuda"])
    pool.cache.normal_()
    attend = _flash if pool.flash else _sequence_by_sequence
    new_tokens: dict[TokenSequence, list[int]] = {}
    for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        sequence = TokenSequence(number, tokens=[0] * (length - count))
        pool.allocate(sequence, length)
        new_tokens[sequence] = [0] * count
    config = policy.model.config
    query = torch.randn(sum(counts), 8, config.head_dim, device=policy.device, dtype=policy.compute_dtype)
    scale = config.head_dim**-0.5
    batch = PagedBatch(new_tokens, pool)
    found = attend(0, query, batch, scale, window)
    expected = _sequence_by_sequence(0, query, batch, scale, window)
    assert not found.isnan().any(), "the output has NaN"
    for sequence, queries, part in zip(new_tokens, query.split(counts), found.split(counts), strict=True):
        if len(queries) == 1 < batch.max_new:
            continue  # Alone, a single query is computed by another kernel.
        batch_of_one = PagedBatch({sequence: new_tokens[sequence]}, pool)
        alone = attend(0, queries, batch_of_one, scale, window)
        assert torch.equal(alone, part), f"a batch changes a sequence of {batch_of_one.longest} tokens"
    return float((found - expected).abs().max())


def model(policy: Policy, machine: Machine) -> str:
    """Compare packed rows and cached turns with the model's own forward."""
    return f"log-probabilities differ by at most {check_model(policy):.2g} nats"


def play(engine: Engine, games: int, new: int, *, prompt: int = 60) -> list[Trajectory]:
    """Play games of two turns, five games of each question."""

    async def one(number: int) -> Trajectory:
        game = Trajectory(Question("q", "d", "?", ("a",)), stop="answered")
        game.add_context([100 + number // 5] * prompt)
        with engine.new_sequence() as sequence:
            for turn in range(2):
                seed = f"{number}/{turn}"
                completion = await engine.generate(game.tokens, max_new=new, seed=seed, sequence=sequence)
                game.add_sampled(Completion(completion.tokens, completion.logprobs, True))
                game.add_context([7, 8, 9])
        return game

    async def everyone() -> list[Trajectory]:
        return await asyncio.gather(*map(one, range(games)))

    return asyncio.run(everyone())


def small_engine(policy: Policy) -> Engine:
    """An engine whose cache is too small for 80 games, so that it preempts some."""
    pool = BlockPool(policy, blocks=80, block_size=BLOCK_SIZE["cuda"])
    return Engine(policy, stop_ids=frozenset(), max_tokens=768, pool=pool)


def gap_of(games: list[Trajectory], policy: Policy) -> str:
    """The gap between the engine's log-probabilities and those of a forward over each game.

    Raises if it is too large.
    """
    differences = []
    for game in games:
        sampled = torch.tensor(game.logprobs)[torch.tensor(game.sampled)]
        scored = policy(pack([[game]], policy.device)).logprobs.cpu()
        differences.append((scored - sampled).abs())
    gap = torch.cat(differences)
    shown = f"{len(gap)} tokens: mean gap {gap.mean():.2g} nats, largest {gap.max():.2g}"
    assert gap.mean() < GAP_LIMIT[policy.compute_dtype], shown
    return shown


@torch.no_grad()
def engine(policy: Policy, machine: Machine) -> str:
    """Compare the engine (on a GPU compiled and with CUDA graphs) and one forward over each game.

    The games cross the edges of blocks, and are as many as the sizes of several graphs.
    """
    games: list[Trajectory] = []
    for count in (1, 5, 17, 80, 256) if machine.on_gpu else (1, 5, 17):
        for prompt in (250, 510):
            played = play(small_engine(policy), count, 40 if machine.on_gpu else 8, prompt=prompt)
            games += played[:: max(1, count // 10)]
    return gap_of(games, policy)


def decode(policy: Policy, machine: Machine) -> str:
    """Measure a decode step of few and many games, beside the time in which memory can be read."""
    counts, prompts = ((1, 80, 256), (128, 1500)) if machine.on_gpu else ((1, 4), (128,))
    pool = None if machine.on_gpu else BlockPool(policy, blocks=9, block_size=2048)
    rollout = Engine(policy, stop_ids=frozenset(), max_tokens=2048, pool=pool)
    weights = sum(weight.nbytes for weight in policy.parameters())
    shown: list[str] = []
    for count in counts:
        for prompt in prompts:
            play(rollout, count, 4, prompt=prompt)  # This captures the graphs.
            seconds = []
            for new in (4, 20):
                start = clock()
                play(rollout, count, new, prompt=prompt)
                seconds.append(clock() - start)
            # Both plays compute the same prompts, and the second has 16 more steps in each of two turns.
            ms = 1000 * (seconds[1] - seconds[0]) / 32
            floor = 1000 * (weights + count * prompt * bytes_of_a_token(policy)) / machine.bandwidth
            shown.append(f"{count} games at {prompt}: {ms:.1f} ms (floor {floor:.1f})")
    cached = rollout._pool.count * rollout._pool.block_size
    return f"{'; '.join(shown)}; the KV cache holds {cached:,} tokens"


@torch.no_grad()
def training_gap(policy: Policy, machine: Machine) -> str:
    """Compare the engine with a learner of float32 weights, whose packed rows are scored as in training."""
    shape = "Qwen3-0.6B" if machine.on_gpu else "small"
    learner = Policy(
        random_model(shape, attention=attention.NAME, device=policy.device),
        compute_dtype=policy.compute_dtype,
    )
    player = random_model(shape, attention=attention.NAME, dtype=policy.compute_dtype, device=policy.device)
    playing = Policy(player, compute_dtype=policy.compute_dtype)
    playing.copy_weights_from(learner)
    games = play(small_engine(playing), 10, 20, prompt=200)
    return gap_of(games, learner)


def update(policy: Policy, machine: Machine) -> str:
    """Measure an optimiser step: packed tokens per second, their share of the machine's peak, and memory."""
    shape, questions = ("Qwen3-0.6B", 8) if machine.on_gpu else ("small", 1)
    before = memory(reset=True)
    model = random_model(shape, attention=attention.NAME, device=policy.device)
    learner = Policy(model, compute_dtype=policy.compute_dtype)
    learner.checkpoint_activations()
    games = random_games(plan(questions, 5, seed=1), vocabulary=1000)
    # Openings are packed once for the five games of a question.
    packed = sum(
        len(pack([[game.trajectory for game in games[start : start + 5]]], CPU).tokens)
        for start in range(0, len(games), 5)
    )
    optimizer = torch.optim.AdamW(learner.trained_parameters(), lr=1e-6, fused=True)
    learn_from(games, learner, optimizer, tokens_per_batch=16_384)
    start = clock()
    metrics = learn_from(games, learner, optimizer, tokens_per_batch=16_384)
    seconds = clock() - start
    assert metrics["grad_norm"] > 0, "the gradient is zero"
    parameters = sum(weight.numel() for weight in learner.parameters())
    utilisation = 6 * parameters * packed / seconds / machine.flops
    return (
        f"{packed / seconds:,.0f} packed tokens/s ({shape}), MFU {utilisation:.1%} of the measured "
        f"peak, {memory() - before:,.0f} MB"
    )


def network(policy: Policy, machine: Machine) -> str:
    """Measure the sum of a gradient over all ranks, and the exchange of small objects."""
    ranks = machine.ranks
    gradient = torch.ones(2**28 if machine.on_gpu else 2**20, device=ranks.device)
    seconds = seconds_of(lambda: dist.all_reduce(gradient), times=5)
    gather = seconds_of(lambda: ranks.gather(ranks.rank), times=20)
    assert ranks.gather(ranks.rank) == list(range(ranks.count)), "an object is lost"
    return f"all_reduce {gradient.nbytes / seconds / 1e9:.3g} GB/s, gather {gather * 1000:.1f} ms"


def main() -> None:
    """Run all checks, and print a line for each."""
    machine = Machine(start_ranks(pick_device("auto"), "ddp"))
    first = machine.ranks.is_first
    policy = random_policy(machine)
    parameters = sum(weight.numel() for weight in policy.parameters())
    if first:
        print(f"{header(machine)}; {parameters:,} parameters in {policy.compute_dtype}", flush=True)
    checks = [machine_speed, paged_attention, model, engine, decode, training_gap, update]
    if machine.ranks.count > 1:
        checks.append(network)
    failed = False
    for check in checks:
        try:
            verdict, measured = "PASS", check(policy, machine)
        except Exception as error:
            verdict, measured, failed = "FAIL", f"{type(error).__name__}: {error}", True
        if first:
            print(f"{verdict}  {check.__name__:16} {measured}", flush=True)
    failed = any(machine.ranks.gather(failed))
    stop_ranks(machine.ranks)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
