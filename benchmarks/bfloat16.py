"""What bfloat16 changes: the gap of engine and policy, and mini runs with and without importance weights.

    python -m benchmarks.bfloat16 gap                             # a random Qwen3 of 36 layers; 1 minute
    python -m benchmarks.bfloat16 learn --seed 0 --steps 20       # two mini runs

`train.py` computes in float32 on a CPU; here it computes in bfloat16.
"""

import argparse
import asyncio
import copy
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import train
from prompt_r1.agent import attention, policy
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.packing import pack
from prompt_r1.agent.policy import Policy
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training.gap import HIGH, IMPORTANCE, MEAN, NAME, TRUNCATED, gap_metrics
from prompt_r1.types import Question, Trajectory

GAMES, PROMPT, NEW = 8, 32, 96  # games of the gap, tokens of their prompts, sampled tokens


def random_model(layers: int, hidden: int = 256, vocabulary: int = 8192) -> Qwen3ForCausalLM:
    """A random Qwen3 in float32, with an untied head whose logits have a standard deviation of 3."""
    attention.register()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        attn_implementation=attention.NAME,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=3 / hidden**0.5)
    return model


def rounded_product(hidden: Tensor, head: Tensor, *, out: Tensor) -> None:
    """The product of `policy._product`, rounded to the dtype of its factors."""
    out.copy_(hidden @ head.T)


async def play(engine: Engine) -> list[Trajectory]:
    """Sample games of one turn from random prompts."""
    rng = torch.Generator().manual_seed(1)
    games = [Trajectory(Question(str(number), "", "", ())) for number in range(GAMES)]
    for game in games:
        game.add_context(torch.randint(0, 8192, (PROMPT,), generator=rng).tolist())
    sampled = [engine.generate(game.tokens, max_new=NEW, seed=game.question.id) for game in games]
    for game, completion in zip(games, await asyncio.gather(*sampled), strict=True):
        game.add_sampled(completion)
    return games


@torch.no_grad()
def gap_of(model: Qwen3ForCausalLM, weights: torch.dtype) -> dict[str, float]:
    """The gap between an engine with bfloat16 weights and a policy that learns, in bfloat16 products.

    `weights` float32: the policy computes under autocast. bfloat16: as FSDP2 gathers them.
    """
    playing = Policy(copy.deepcopy(model).bfloat16(), compute=torch.bfloat16)
    learning = Policy(copy.deepcopy(model).to(weights), compute=torch.bfloat16)
    engine = Engine(playing, stop_ids=frozenset(), max_tokens=PROMPT + NEW, kv_tokens=GAMES * (PROMPT + NEW))
    games = asyncio.run(play(engine))
    differences = []
    for game in games:
        engine_logprobs = torch.tensor(game.logprobs)[torch.tensor(game.sampled)]
        differences.append(learning(pack([[game]], torch.device("cpu"))).logprobs - engine_logprobs)
    return gap_metrics(differences, cap=2.0)


def measure_gap(layers: int) -> None:
    """Print the gap for each kind of logits and of learning weights."""
    model = random_model(layers)
    print(f"{layers} layers, {GAMES * NEW} sampled tokens; nats, and importance weights with C = 2")
    print("| logits | learning weights | mean | 99 % | largest | mean weight | truncated |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, product in (("bfloat16", rounded_product), ("float32", policy._product)):
        for weights, kind in ((torch.float32, "float32, autocast"), (torch.bfloat16, "bfloat16, as FSDP2")):
            with patch.object(policy, "_product", product):
                row = gap_of(model, weights)
            cells = [f"{row[key]:.4f}" for key in (MEAN, HIGH, NAME, IMPORTANCE, TRUNCATED)]
            print("| " + " | ".join([name, kind, *cells]) + " |", flush=True)


def learn(seed: int, steps: int, caps: list[float], out: Path, *, dtype: str) -> None:
    """Run the mini run with each cap, and print validation EM by step and the metrics of the gap."""
    for cap in caps:
        run = out / f"seed{seed}-cap{cap:g}"
        settings = f"--seed {seed} --steps {steps} --importance-cap {cap} --test-data none --val-every 10"
        before = time.process_time()
        with patch("prompt_r1.agent.agent.compute_dtype", lambda name, device: getattr(torch, dtype)):
            train.main([*settings.split(), "--out", str(run), "--device", "cpu"])
        seconds = time.process_time() - before
        lines = read_metrics(run)
        validated = {line["step"]: line["val/em"] for line in lines if "val/em" in line}
        print(f"\nseed {seed}, {dtype}, C = {cap:g}: {seconds:.0f} s of CPU")
        print("validation EM  " + "  ".join(f"{step}: {em:.2f}" for step, em in validated.items()))
        for name in (MEAN, HIGH, NAME, IMPORTANCE, TRUNCATED, "clip_frac"):
            values = [line[name] for line in lines if name in line]
            print(f"{name:30} mean {sum(values) / len(values):.5f}   largest {max(values):.5f}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("gap", "learn"))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--caps", type=float, nargs="+", default=[0.0, 2.0], help="importance caps to run")
    parser.add_argument("--out", type=Path, help="folder of the runs (a temporary one)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args(arguments)
    if given.what == "gap":
        measure_gap(given.layers)
    else:
        out = given.out or Path(tempfile.mkdtemp(prefix="bfloat16-"))
        learn(given.seed, given.steps, given.caps, out, dtype=given.dtype)


if __name__ == "__main__":
    main()
