"""Our rollout engine and its rivals: the same model and games, greedy, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout [--questions 8] [--rounds 3]
    python -m benchmarks.rollout --model Qwen3-4B --lengths long --questions 16 --rivals lockstep
    python -m benchmarks.rollout --model smollm2 --lengths decode --group-size 1 --rivals lockstep

The rivals are lockstep `model.generate`, which recomputes every game from its first token in every turn (as
the released code does), and transformers' continuous batching (pages of 32 tokens, shared blocks, independent
games). The variants take turns in several rounds, and the table has medians.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
from transformers import PreTrainedModel

from benchmarks.measuring import compare, make_parser, measuring, table
from benchmarks.rivals import PlayedRun, play_continuous, play_generate
from benchmarks.workload import (
    LENGTHS,
    SHAPES,
    PlannedGame,
    count_work,
    greedy_game,
    longest,
    plan,
    play_async,
    random_model,
    smollm2,
    totals,
)
from prompt_r1.engine.engine import Engine
from prompt_r1.engine.kv_cache import BlockPool
from prompt_r1.model import attention
from prompt_r1.model.policy import Policy
from prompt_r1.settings.agent import SMOLLM2

RIVALS = ("lockstep", "continuous")


def play_ours(policy: Policy, games: list[PlannedGame], *, latency: bool) -> PlayedRun:
    """Play with our engine."""
    # On a CPU the cache holds all games. On a GPU the engine chooses its size, as in training.
    pool = None
    if policy.device.type == "cpu":
        pool = BlockPool(policy, blocks=len(games) * 5 // 4, block_size=longest(games))
    run = PlayedRun()
    with measuring(run):
        engine = Engine(policy, stop_ids=frozenset(), max_tokens=longest(games), pool=pool)
        work = count_work(engine)
        run.tokens = asyncio.run(play_async(games, partial(greedy_game, engine), latency=latency))
    run.prefilled = work.prefilled
    return run


def main() -> None:
    """Play all variants, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=5, help="games of a question")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds")
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=RIVALS, help="to compare with")
    about = "smollm2, or random weights, of the large shapes in bfloat16"
    parser.add_argument("--model", choices=(*SHAPES, SMOLLM2), default="small", help=about)
    parser.add_argument("--lengths", choices=LENGTHS, default="short", help="lengths of the games")
    parser.add_argument("--batch", type=int, default=256, help="most tokens of a continuous batch")
    choice = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if choice.model in ("small", SMOLLM2) else torch.bfloat16
    load: Callable[..., PreTrainedModel]
    if choice.model == SMOLLM2:
        load = smollm2
    else:
        load = partial(random_model, choice.model, dtype=dtype, device=device)
    attention.register()
    games = plan(choice.questions, choice.group_size, seed=1, lengths=LENGTHS[choice.lengths])
    print(totals(games), flush=True)
    policy = Policy(load(attention=attention.NAME), compute_dtype=dtype)
    rival = load(attention="sdpa")
    variants: dict[str, Callable[[], PlayedRun]] = {
        "ours": partial(play_ours, policy, games, latency=True),
        "ours, no latency": partial(play_ours, policy, games, latency=False),
    }
    if "lockstep" in choice.rivals:
        variants["lockstep generate"] = partial(play_generate, rival, games, latency=True)
    if "continuous" in choice.rivals:
        options = {"batch": choice.batch, "pages": 4096 * len(games) // 40}
        paged = load(attention="sdpa")
        variants["continuous batching"] = partial(play_continuous, paged, games, latency=True, **options)
    runs = compare(variants, choice.rounds)
    print("\n" + table(runs))
    print(verdict(runs, games))


def verdict(runs: Mapping[str, list[PlayedRun]], games: list[PlannedGame]) -> str:
    """The speed of our engine, and whether all variants wrote the same tokens."""
    work = totals(games)
    seconds = median(run.wall for run in runs["ours"])
    tokens = runs["ours"][0].tokens
    different = [name for name in runs if any(run.tokens != tokens for run in runs[name])]
    most = max(run.prefilled for name in runs if name.startswith("ours") for run in runs[name])
    return (
        f"ours: {work.new_tokens / seconds:.0f} sampled tokens/s, {most:,} prompt tokens computed of "
        f"{work.prefill:,}; other tokens than ours: {', '.join(different) or 'none'}"
    )


if __name__ == "__main__":
    main()
