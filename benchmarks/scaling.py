"""How the engine's cost grows with the number of games, and over the turns of a game.

    OMP_NUM_THREADS=1 python -m benchmarks.scaling [--questions 8] [--rounds 3]

Twice the games should take at most 2.1 × the time (without latency, so all time is work). Except for
attention, which reads a longer history, a token of the fifth turn should cost as much as one of the first.
This is measured in games of five equally long turns in lockstep, as the time of decode steps for each token,
with and without attention. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from benchmarks.rollout import TimedEngine, play_ours
from benchmarks.runs import PlayedRun, measured, median_of
from benchmarks.workload import LENGTHS, VOCABULARY, PlannedGame, plan, small_model
from prompt_r1.agent import attention
from prompt_r1.agent.decode_kernels import Kernel
from prompt_r1.agent.policy import Policy

TURNS = 5
NEW = 100  # tokens of a turn
REPLY = 200  # tokens of a reply


class AttentionTimedEngine(TimedEngine):
    """Also measures how much of its forwards is attention."""

    attention_seconds = 0.0

    def _allocate_arena(self) -> None:
        super()._allocate_arena()
        self._kernel = self._timed(self._kernel)

    def _timed(self, kernel: Kernel) -> Kernel:
        def timed(*arguments: object) -> torch.Tensor:
            start = time.perf_counter()
            out = kernel(*arguments)
            self.attention_seconds += time.perf_counter() - start
            return out

        return timed


@dataclass(frozen=True)
class DecodeTime:
    """Milliseconds of decoding for each token of a turn."""

    total: float
    without_attention: float


def decode_by_turn(policy: Policy, games: int) -> list[DecodeTime]:
    """The decode time of turns 1 to 5. For a CPU only: the clock does not wait for a GPU."""
    rng = random.Random(1)
    histories = [[rng.randrange(VOCABULARY) for _ in range(LENGTHS["short"].prompt)] for _ in range(games)]
    engine = AttentionTimedEngine(policy, stop_ids=frozenset(), max_tokens=4096, kv_tokens=games * 4096)
    times: list[DecodeTime] = []

    async def play_turn(new: int) -> list[list[int]]:
        calls = (engine.generate(tokens, max_new=new, seed="", temperature=0.0) for tokens in histories)
        return [completion.tokens for completion in await asyncio.gather(*calls)]

    with asyncio.Runner() as runner:
        for _ in range(TURNS):
            # The first token, with the prefill of the turn, is not measured.
            for history, tokens in zip(histories, runner.run(play_turn(1)), strict=True):
                history += tokens
            engine.decode_seconds = engine.attention_seconds = 0.0
            for history, tokens in zip(histories, runner.run(play_turn(NEW)), strict=True):
                history += tokens + [rng.randrange(VOCABULARY) for _ in range(REPLY)]
            scale = 1e3 / games / NEW
            rest = engine.decode_seconds - engine.attention_seconds
            times.append(DecodeTime(engine.decode_seconds * scale, rest * scale))
    return times


def with_other_tokens(game: PlannedGame) -> PlannedGame:
    """A game of the same lengths that shares no prefix with the given one."""

    def shifted(tokens: list[int]) -> list[int]:
        return [(token + 1) % VOCABULARY for token in tokens]

    turns = [replace(turn, reply=shifted(turn.reply)) for turn in game.turns]
    return PlannedGame(shifted(game.prompt), turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=8, help="questions, each played 5 times (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default 3)")
    choice = parser.parse_args()
    attention.register()
    policy = Policy(small_model(attention=attention.NAME), compute=torch.float32)
    once = plan(choice.questions, 5, seed=1)
    workloads = {"once": once, "twice": once + [with_other_tokens(game) for game in once]}
    runs: dict[str, list[PlayedRun]] = {"once": [], "twice": []}
    rounds: list[list[DecodeTime]] = []
    for number in range(choice.rounds):
        for name, games in workloads.items():
            run = measured(partial(play_ours, policy, games, latency=False))
            runs[name].append(run)
            print(f"  round {number + 1}  {name:<6} {run.wall:7.2f} s wall {run.cpu:7.2f} s CPU", flush=True)
        times = decode_by_turn(policy, 5 * choice.questions)
        rounds.append(times)
        shown = [f"{time.total:.3f} ({time.without_attention:.3f})" for time in times]
        print("  ms per token (without attention):", *shown, flush=True)
    total = medians_by_turn([[time.total for time in times] for times in rounds])
    rest = medians_by_turn([[time.without_attention for time in times] for times in rounds])
    growth = {
        field: round(median_of(runs["twice"], field) / median_of(runs["once"], field), 3)
        for field in ("wall", "cpu")
    }
    summary = {
        "twice_the_games": growth["wall"],
        "twice_the_games_cpu": growth["cpu"],
        "decode_ms_per_token": total,
        "without_attention": rest,
        "fifth_to_first_without_attention": round(rest[-1] / rest[0], 3),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(summary))


def medians_by_turn(rounds: list[list[float]]) -> list[float]:
    """The median over the rounds for each turn."""
    return [round(median(times), 4) for times in zip(*rounds, strict=True)]


if __name__ == "__main__":
    main()
