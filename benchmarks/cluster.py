"""A training step on a cluster, simulated on one CPU core: what would hold GPUs back, without one.

    OMP_NUM_THREADS=1 python -m benchmarks.cluster

The rollout is the real engine on a virtual clock (`virtual.py`): host CPU time is measured, device time is
calculated. The balance of the update is counted from the micro-batches of each rank, the launches of a decode
step are traced with meta tensors (`launches.py`). Device times are assumptions that no GPU has confirmed. The
last line is JSON.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median

import torch

from benchmarks.launches import trace_decode_step
from benchmarks.virtual import (
    A100,
    CONTEXT_FLOP,
    H200,
    SCORED_FLOP,
    TOKEN_FLOP,
    Device,
    Launches,
    VirtualRollout,
    play_virtually,
)
from benchmarks.workload import LENGTHS, large_model, plan
from prompt_r1.agent import attention
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.training.balance import assign_games, share_games, size_of
from prompt_r1.training.update import split
from prompt_r1.types import Question, Reward, ScoredGame, Trajectory

CPU = torch.device("cpu")
RANKS = (1, 2, 4, 8, 16, 64)
# An update makes six forwards' worth of FLOP: a forward, two for backward, one recomputed, old and reference
# log-probabilities.
FORWARDS = 6


def scored_groups(lengths: Sequence[Sequence[int]], group_size: int) -> list[list[ScoredGame]]:
    """Games of these lengths (prompt, turn, reply, turn, …); `group_size` in a row have the same question."""
    rng = random.Random(1)
    groups_PG = []
    for start in range(0, len(lengths), group_size):
        # The prompts are equally long in tokens, but the texts of real questions are not.
        question = Question(str(start), "", "?" * rng.randint(30, 300), ("",))
        games = [Trajectory(question) for _ in range(group_size)]
        for game, parts in zip(games, lengths[start : start + group_size], strict=True):
            for position, length in enumerate(parts):
                game.tokens += [start] * length
                game.sampled += [position % 2 == 1] * length
            game.logprobs = [0.0] * len(game.tokens)
        groups_PG.append([ScoredGame(game, Reward(0.0, 0.0, 0.0), 0.0) for game in games])
    return groups_PG


def columns(games: Sequence[Trajectory]) -> int:
    """Tokens of a row with these games, each opening once."""
    openings = {tuple(game.tokens[: game.opening]): game.opening for game in games}
    return sum(openings.values()) + sum(len(game.tokens) - 1 - game.opening for game in games)


def micro_batches(games: list[ScoredGame], ranks: int, limit: int) -> list[list[list[ScoredGame]]]:
    """The micro-batches of each rank in an optimiser step on these games, as training divides them."""
    if ranks == 1:
        return share_games([games], Ranks(rank=0, count=1, device=CPU), tokens_per_batch=limit)
    by_rank = assign_games([size_of(game) for game in games], ranks=ranks, tokens_per_batch=limit)
    return [[[games[number] for number in batch] for batch in batches] for batches in by_rank]


def update_efficiency(games_PG: list[list[ScoredGame]], ranks: int, mini_batch: int, limit: int) -> float:
    """Tokens of an ideal split, with every opening once, divided by the tokens on the critical path.

    All ranks wait for the slowest one in every micro-batch, because FSDP gathers weights in each forward.
    """
    ideal = critical = 0.0
    steps = split(
        games_PG,
        games=sum(map(len, games_PG)),
        group_size=len(games_PG[0]),
        mini_batch=mini_batch,
        numbers=range(len(games_PG)),
    )
    for games in steps:
        ideal += columns([game.trajectory for game in games]) / ranks
        for batches in zip(*micro_batches(games, ranks, limit), strict=True):
            critical += max(columns([game.trajectory for game in batch]) for batch in batches)
    return ideal / critical


def update_flop(games_PG: list[list[ScoredGame]]) -> float:
    """FLOP of an update on these games, each opening once."""
    games = [game.trajectory for group in games_PG for game in group]
    context = sum(len(game.tokens) * (len(game.tokens) - 1) / 2 for game in games)
    scored = sum(sum(game.sampled) for game in games)
    forward = TOKEN_FLOP * columns(games) + CONTEXT_FLOP * context + SCORED_FLOP * scored
    return FORWARDS * forward


def step_milliseconds(rows: int, launches: Launches) -> float:
    """Median host milliseconds of a step without admission, while this many games decode."""
    games = plan(rows, 1, seed=1, lengths=replace(LENGTHS["long"], turns=(1,)))
    run = play_virtually(games, LENGTHS["long"], replace(H200, kv_tokens=rows * 2048), launches)
    # The prompts are computed in the first steps; the shortest turn has 120 tokens.
    return 1e3 * median(run.steps[40:100])


def step_seconds(
    rollout: VirtualRollout, games_PG: list[list[ScoredGame]], device: Device, ranks: int, efficiency: float
) -> float:
    """The virtual time of a training step: the rollout, then the update at this balance."""
    update = update_flop(games_PG) / (ranks * device.flops * device.update_mfu * efficiency)
    return rollout.seconds + update


def describe(name: str, run: VirtualRollout) -> str:
    """Lines about a rollout."""
    return (
        f"{name}: {run.seconds:.0f} s (graphs {run.graph_seconds:.0f}, other forwards "
        f"{run.eager_seconds:.0f}, host {run.host_seconds:.0f}, waiting {run.waiting_seconds:.0f})\n"
        f"    {len(run.steps)} steps, {run.sampled} tokens sampled, decode batch {run.decode_batch:.1f}\n"
        f"    {run.prefilled} prompt tokens computed of {run.needed} needed\n"
        f"    host ms a step: admission {1e3 * mean(run.admissions):.2f}, rest {1e3 * mean(run.steps):.2f}"
    )


def main() -> None:
    """Trace, play, count, and print the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=128, help="of a step, each played 5 times")
    choice = parser.parse_args()
    torch.set_num_threads(1)
    config, lengths = TrainConfig(), LENGTHS["long"]

    attention.register()
    model = large_model(attention=attention.NAME, device=torch.device("meta"))
    traced = trace_decode_step(model, rows=64)
    launches = traced.launches
    print(
        f"a decode step launches {launches.total} kernels ({launches.products} products, "
        f"{launches.attention} attention, {launches.small} small) and waits for {traced.uploads} copies to "
        f"the device and {traced.downloads} from it; {traced.copies} more copies do not wait"
    )

    games = plan(choice.questions, config.group_size, seed=1, lengths=lengths)
    share = games[: len(games) // 8]
    a100 = play_virtually(share, lengths, A100, launches)
    print(describe(f"{len(share)} games on a rank with {A100.kv_tokens} tokens of cache ({A100.name})", a100))
    h200 = play_virtually(games, lengths, H200, launches)
    print(describe(f"{len(games)} games on a rank with {H200.kv_tokens} tokens of cache ({H200.name})", h200))
    step_ms_128 = step_milliseconds(128, launches)
    print(f"host ms of a step of 128 games, without admission: {step_ms_128:.2f}")

    games_PG = scored_groups(h200.games, config.group_size)
    efficiency = {
        ranks: update_efficiency(games_PG, ranks, config.games_per_update, config.tokens_per_batch)
        for ranks in RANKS
    }
    for ranks, value in efficiency.items():
        print(f"update on {ranks} ranks: {value:.2f} of the tokens on the critical path are needed")
    step_a100 = step_seconds(a100, games_PG, A100, 8, efficiency[8])
    step_h200 = step_seconds(h200, games_PG, H200, 1, efficiency[1])
    print(f"virtual step: 8 x {A100.name} {step_a100:.0f} s, {H200.name} {step_h200:.0f} s")
    summary = {
        "update_efficiency_8": round(efficiency[8], 3),
        "update_efficiency_16": round(efficiency[16], 3),
        "admission_ms_640": round(1e3 * mean(h200.admissions), 3),
        "step_ms_128": round(step_ms_128, 3),
        "virtual_rollout_s_a100": round(a100.seconds, 1),
        "prefill_ratio_a100": round(a100.prefill_ratio, 2),
        "decode_batch_a100": round(a100.decode_batch, 1),
        "launches_decode": launches.total,
        "syncs_decode": traced.synchronisations,
        "virtual_step_s_a100x8": round(step_a100, 1),
        "virtual_step_s_h200": round(step_h200, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
