"""The first five minutes on a CUDA machine: is it right, how fast is it, and does it fit?

    python -m benchmarks.gpu_check          # on a CPU the same code checks a tiny model

It prints a line for each check: PASS or FAIL (a wrong result, or an error), and what was measured. The
weights are random, in the shape of Qwen3-4B on GPUs of more than 60 GB, and of Qwen3-0.6B on smaller GPUs.
The exit code is 1 if a check failed.
"""

import asyncio
import sys

import torch
from torch import Tensor

from benchmarks.measuring import clock, memory
from benchmarks.workload import learn_from, plan, random_games, random_model
from prompt_r1.engine.engine import Engine
from prompt_r1.engine.kv_cache import (
    BLOCK_SIZE,
    BlockPool,
    PagedBatch,
    Sequence,
    _flash,
    _sequence_by_sequence,
)
from prompt_r1.engine.model_check import check_model
from prompt_r1.model import attention
from prompt_r1.model.distributed import pick_device
from prompt_r1.model.policy import Policy

# The largest mean difference in nats between log-probabilities that rounding explains.
GAP_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def random_policy() -> Policy:
    """A policy with random weights, as large as the device allows."""
    attention.register()
    if not torch.cuda.is_available():
        return Policy(random_model(attention=attention.NAME), compute_dtype=torch.float32)
    device = pick_device("auto")  # the rank's own GPU, with the allocator's settings of a training
    large = torch.cuda.get_device_properties(device).total_memory > 60e9
    shape = "Qwen3-4B" if large else "Qwen3-0.6B"
    model = random_model(shape, attention=attention.NAME, dtype=torch.bfloat16, device=device)
    return Policy(model, compute_dtype=torch.bfloat16)


def paged_attention(policy: Policy) -> str:
    """Compare FlashAttention with a block table and SDPA, which computes sequence by sequence."""
    torch.manual_seed(0)
    pool = BlockPool(
        policy.model.config,
        blocks=64,
        block_size=BLOCK_SIZE["cuda"],
        dtype=policy.compute_dtype,
        device=policy.device,
    )
    pool.keys.normal_()
    pool.values.normal_()
    worst = 0.0
    for counts in ((1, 1, 1), (1, 300, 40)):
        sequences = [Sequence(number, [0] * length) for number, length in enumerate((700, 513, 40))]
        for sequence in sequences:
            pool.allocate(sequence, len(sequence.tokens))
        batch = PagedBatch(dict(zip(sequences, counts, strict=True)), pool)
        heads = policy.model.config.num_attention_heads
        query = torch.randn(
            sum(counts), heads, pool.keys.shape[4], device=policy.device, dtype=pool.keys.dtype
        )
        scale = query.shape[2] ** -0.5
        found = _flash(0, query, batch, scale, None)
        difference = (found - _sequence_by_sequence(0, query, batch, scale, None)).abs().max()
        worst = max(worst, float(difference))
    assert worst < 2e-2, f"the outputs differ by up to {worst:.2g}"
    return f"outputs differ by at most {worst:.2g}"


def model(policy: Policy) -> str:
    """Compare packed rows and cached turns with the model's own forward."""
    return f"log-probabilities differ by at most {check_model(policy):.2g} nats"


def play(engine: Engine, games: int, new: int) -> list[tuple[list[int], Tensor]]:
    """Play games of two turns, five games of each question.

    Returns the tokens of each game, and the engine's log-probabilities (NaN for tokens that were not
    sampled).
    """

    async def one(number: int) -> tuple[list[int], Tensor]:
        tokens, found = [100 + number // 5] * 60, []
        with engine.new_sequence() as game:
            for turn in range(2):
                seed = f"{number}/{turn}"
                completion = await engine.generate(tokens, max_new=new, seed=seed, sequence=game)
                found.append((len(tokens), completion))
                tokens = [*tokens, *completion.tokens, 7, 8, 9]
        logprobs = torch.full((len(tokens),), torch.nan)
        for start, completion in found:
            logprobs[start : start + len(completion.tokens)] = torch.tensor(completion.logprobs)
        return tokens, logprobs

    async def everyone() -> list[tuple[list[int], Tensor]]:
        return await asyncio.gather(*map(one, range(games)))

    return asyncio.run(everyone())


@torch.no_grad()
def engine(policy: Policy) -> str:
    """Compare the engine (on a GPU with CUDA graphs) and one forward over each game."""
    gaps: list[Tensor] = []
    played = play(Engine(policy, stop_ids=frozenset(), max_tokens=512, kv_tokens=20_000), games=20, new=40)
    for tokens, found in played:
        row = torch.tensor([tokens], device=policy.device)
        logits = policy.logits(policy.model.base_model(row).last_hidden_state[0])
        expected = torch.log_softmax(logits[:-1], -1).gather(1, row[0, 1:, None])[:, 0].cpu()
        gaps.append((found[1:] - expected)[~found[1:].isnan()].abs())
    mean, largest = float(torch.cat(gaps).mean()), float(torch.cat(gaps).max())
    assert mean < GAP_LIMIT[policy.compute_dtype], (
        f"the mean gap is {mean:.2g} nats, the largest {largest:.2g}"
    )
    return f"{len(torch.cat(gaps))} tokens: mean gap {mean:.2g} nats, largest {largest:.2g}"


def decode(policy: Policy) -> str:
    """Measure how many tokens a rollout samples per second."""
    games, new, kv_tokens = (128, 200, 0) if policy.device.type == "cuda" else (10, 20, 20_000)
    rollout = Engine(policy, stop_ids=frozenset(), max_tokens=1024, kv_tokens=kv_tokens)
    play(rollout, games, new)  # This captures the graphs.
    start = clock()
    played = play(rollout, games, new)
    seconds = clock() - start
    speed = sum(int((~logprobs.isnan()).sum()) for _, logprobs in played) / seconds
    cached = rollout._pool.count * rollout._pool.block_size
    return f"{speed:,.0f} sampled tokens/s, {games} games at once; the KV cache holds {cached:,} tokens"


def update(policy: Policy) -> str:
    """Measure how many tokens an optimiser step computes per second, and its peak of memory."""
    shape, questions = ("Qwen3-0.6B", 8) if policy.device.type == "cuda" else ("small", 1)
    model = random_model(shape, attention=attention.NAME, device=policy.device)
    learner = Policy(model, compute_dtype=policy.compute_dtype)
    learner.checkpoint_activations()
    games = random_games(plan(questions, 5, seed=1), vocabulary=1000)
    optimizer = torch.optim.AdamW(learner.trained_parameters(), lr=1e-6, fused=True)
    learn_from(games, learner, optimizer, tokens_per_batch=16_384)
    memory(reset=True)
    start = clock()
    metrics = learn_from(games, learner, optimizer, tokens_per_batch=16_384)
    speed = sum(len(game.trajectory.tokens) for game in games) / (clock() - start)
    assert metrics["grad_norm"] > 0, "the gradient is zero"
    return f"{speed:,.0f} tokens/s ({shape}), peak {memory():,.0f} MB"


def main() -> None:
    """Run all checks, and print a line for each."""
    policy = random_policy()
    name = torch.cuda.get_device_name() if policy.device.type == "cuda" else "CPU"
    parameters = sum(weight.numel() for weight in policy.parameters())
    print(
        f"{name}, torch {torch.__version__}, {parameters:,} parameters in {policy.compute_dtype}", flush=True
    )
    failed = False
    kernels = (paged_attention,) if policy.device.type == "cuda" else ()  # FlashAttention needs a GPU.
    for check in (*kernels, model, engine, decode, update):
        try:
            verdict, measured = "PASS", check(policy)
        except Exception as error:
            verdict, measured, failed = "FAIL", f"{type(error).__name__}: {error}", True
        print(f"{verdict}  {check.__name__:16} {measured}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
