"""Peak memory of a process on a CPU, beside the estimate of `train.py --dry-run --device cpu`.

    OMP_NUM_THREADS=1 python -m benchmarks.memory [--size small] [--ranks 1 2] [--adapter-rank 8]

The model has random weights and the sizes of Qwen3-0.6B (`small`: 10 M parameters); with two ranks FSDP2
shards it over gloo. Each case runs in processes of its own. "playing" is the first rollout, which fills the
KV cache; "update" is the second optimiser step, when AdamW's moments exist. The frozen reference is not
loaded, and in the update of several ranks neither is the copy that plays, because two ranks of the large
model would need 20 GB. With adapters there is one process. Measured is the largest resident set (Linux: VmHWM
after a reset). The last line is JSON.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from benchmarks.runs import memory
from prompt_r1.agent.adapters import add_lora
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.loading import load_policy
from prompt_r1.agent.policy import Policy
from prompt_r1.distributed.ranks import Ranks, start_ranks, stop_ranks
from prompt_r1.training.gap import NAME, Limit
from prompt_r1.training.memory_estimate import PROCESS_BYTES, Setup, shape_of, state_bytes, update_bytes
from prompt_r1.training.update import Update
from prompt_r1.types import Completion, Question, Reward, ScoredGame, Trajectory
from train import learn

GAMES = 4  # of a question
PROMPT, NEW = 100, 8  # tokens of a game that is played
PARTS = ("playing", "update")


def save_model(folder: Path, size: str) -> None:
    """Save a random Qwen3 in bfloat16."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    }
    if size == "small":
        sizes |= {"vocab_size": 16_384, "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = Qwen3ForCausalLM._from_config(Qwen3Config(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def estimated(folder: Path, part: str, ranks: int, tokens: int, *, adapter_rank: int = 0) -> float:
    """MB of a process, by the functions of --dry-run."""
    shape = shape_of(AutoConfig.from_pretrained(folder))
    setup = Setup(ranks, full=ranks == 1, width=4, reference=False, device="cpu", adapter_rank=adapter_rank)
    states = state_bytes(shape, setup)
    if part == "playing":
        cache = kv_tokens() * 2 * shape.layers * shape.key * 4
        parts = [states["float32 weights"], states["copy that plays"], cache]
    else:
        parts = [*states.values(), *update_bytes(shape, setup, tokens=tokens).values()]
        if ranks > 1:
            parts.append(-states["copy that plays"])
    return (PROCESS_BYTES + sum(parts)) / 1e6


def kv_tokens() -> int:
    """Tokens of the KV cache, which the games fill."""
    return GAMES * (PROMPT + NEW)


def random_games(tokens: int, *, seed: int) -> list[ScoredGame]:
    """Games of one question that make a micro-batch of about so many tokens."""
    rng = random.Random(seed)
    opening = [rng.randrange(1000) for _ in range(tokens // 5)]
    games = []
    for _ in range(GAMES):
        trajectory = Trajectory(Question("q", "d", "?", ("a",)), stop="answered")
        trajectory.add_context(opening)
        new = [rng.randrange(1000) for _ in range(tokens // 5)]
        trajectory.add_sampled(Completion(new, [0.0] * len(new), True))
        games.append(ScoredGame(trajectory, Reward(0, 0, 0), rng.gauss(0, 1)))
    return games


def peak_of_playing(player: Policy) -> float:
    """MB at most, while games are played that fill the KV cache."""
    engine = Engine(player, stop_ids=frozenset(), max_tokens=PROMPT + NEW, kv_tokens=kv_tokens())

    async def play() -> None:
        prompts = [random.Random(game).choices(range(1000), k=PROMPT) for game in range(GAMES)]
        await asyncio.gather(
            *(engine.generate(prompt, max_new=NEW, seed=str(game)) for game, prompt in enumerate(prompts))
        )

    gc.collect()
    memory(reset=True)
    asyncio.run(play())
    return memory()


def peak_of_update(policy: Policy, ranks: Ranks, tokens: int) -> float:
    """MB at most in the second optimiser step."""
    update = Update(
        policy,
        None,
        torch.optim.AdamW(policy.trained_parameters(), lr=1e-6),
        ranks,
        grad_clip=1.0,
        token_mean=False,
        tokens_per_batch=tokens,
        gap_limit=Limit(NAME, math.inf, math.inf),
    )
    for step in range(2):
        gc.collect()
        memory(reset=True)
        learn(update, [random_games(tokens, seed=10 * step + ranks.rank)], clip=0.2, kl_coef=0.0)
    return memory()


def measure_here(folder: Path, part: str, tokens: int, *, adapter_rank: int = 0) -> float:
    """MB of this process, one rank of a case."""
    ranks = start_ranks("cpu", "auto" if "RANK" not in os.environ else "fsdp")
    policy = load_policy(folder, device=ranks.device, check=False)
    if adapter_rank:
        add_lora(policy.model, rank=adapter_rank, alpha=32)
    policy.checkpoint_activations()
    player = policy
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=False)
        if part == "playing":
            player = load_policy(folder, device=ranks.device, check=False)
    peak = peak_of_playing(player) if part == "playing" else peak_of_update(policy, ranks, tokens)
    stop_ranks(ranks)
    return peak


def measured(folder: Path, part: str, ranks: int, tokens: int, *, adapter_rank: int = 0) -> float:
    """MB of the largest rank."""
    program = [sys.executable, "-m", "benchmarks.memory", "--here", str(folder), part]
    processes = []
    for rank in range(ranks):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        variables["MASTER_PORT"] = "29655"
        process = subprocess.Popen(
            [*program, "--tokens", str(tokens), "--adapter-rank", str(adapter_rank)],
            env={**os.environ, **variables} if ranks > 1 else None,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return max(float(output.split()[-1]) for output in outputs)


def main(arguments: list[str]) -> None:
    """Measure each case, and print it beside its estimate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=("small", "large"), default="large")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--tokens", type=int, default=160, help="tokens of a micro-batch")
    parser.add_argument("--adapter-rank", type=int, default=0, help="train adapters of this rank; 0: all")
    parser.add_argument("--here", nargs=2, metavar=("FOLDER", "PART"), help="measure this process")
    given = parser.parse_args(arguments)
    if given.here:
        folder, part = given.here
        print(measure_here(Path(folder), part, given.tokens, adapter_rank=given.adapter_rank))
        return
    results: dict[str, list[float]] = {}
    print(f"{'MB of a process':<28}{'estimated':>12}{'measured':>12}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), given.size)
        for ranks in [1] if given.adapter_rank else given.ranks:
            for part in given.parts:
                case = f"{part}, {ranks} × FSDP2" if ranks > 1 else f"{part}, one process"
                rank = given.adapter_rank
                found = measured(Path(name), part, ranks, given.tokens, adapter_rank=rank)
                expected = estimated(Path(name), part, ranks, given.tokens, adapter_rank=rank)
                results[case] = [round(expected), round(found), round(expected / found, 3)]
                print(f"{case:<28}{expected:>12,.0f}{found:>12,.0f}{expected / found:>8.3f}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
