"""How the engine's cost grows: twice the games, and later turns.

    OMP_NUM_THREADS=1 python -m benchmarks.scaling [--questions 8] [--rounds 3]

Twice the games should take at most 2.1 × the time (no latency, so that time is work). A token of the fifth
turn should cost what one of the first does, but for attention, which reads a longer history: games of five
turns in lockstep, each turn as long as the others, time of decode steps for each token with and without
attention. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import replace
from statistics import median

import torch

from benchmarks.rollout import Timed, play_ours
from benchmarks.runs import measured
from benchmarks.workload import LENGTHS, VOCABULARY, PlannedGame, plan, small_model
from prompt_r1.agent import attention
from prompt_r1.agent.attention import Kernel
from prompt_r1.agent.policy import Policy

TURNS, NEW, REPLY = 5, 100, 200  # tokens of a turn, of a reply


class Divided(Timed):
    """Tells how much of its forwards is attention."""

    attention_seconds = 0.0

    def _allocate(self) -> None:
        super()._allocate()
        self._kernel = self._timed(self._kernel)

    def _timed(self, kernel: Kernel) -> Kernel:
        def timed(*arguments: object) -> torch.Tensor:
            start = time.perf_counter()
            out = kernel(*arguments)
            self.attention_seconds += time.perf_counter() - start
            return out

        return timed


def decode_by_turn(policy: Policy, games: int) -> list[tuple[float, float]]:
    """Milliseconds of decoding for each token of turns 1-5: whole, and without attention. CPU only: the
    clock does not wait for a GPU.
    """
    rng = random.Random(1)
    histories = [[rng.randrange(VOCABULARY) for _ in range(LENGTHS["short"].prompt)] for _ in range(games)]
    engine = Divided(policy, stop_ids=frozenset(), max_tokens=4096, kv_tokens=games * 4096)
    turns = []

    async def turn(new: int) -> list[list[int]]:
        draws = (engine.generate(tokens, max_new=new, seed="", temperature=0.0) for tokens in histories)
        return [drawn.tokens for drawn in await asyncio.gather(*draws)]

    with asyncio.Runner() as runner:
        for _ in range(TURNS):
            for history, tokens in zip(histories, runner.run(turn(1)), strict=True):  # prefill apart
                history += tokens
            engine.decode_seconds = engine.attention_seconds = 0.0
            for history, tokens in zip(histories, runner.run(turn(NEW)), strict=True):
                history += tokens + [rng.randrange(VOCABULARY) for _ in range(REPLY)]
            whole, apart = engine.decode_seconds, engine.decode_seconds - engine.attention_seconds
            turns.append((1e3 * whole / games / NEW, 1e3 * apart / games / NEW))
    return turns


def in_other_words(game: PlannedGame) -> PlannedGame:
    """A game of the same lengths, of which nothing is shared with the first."""

    def others(tokens: list[int]) -> list[int]:
        return [(token + 1) % VOCABULARY for token in tokens]

    turns = [replace(turn, reply=others(turn.reply)) for turn in game.turns]
    return PlannedGame(others(game.prompt), turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=8, help="each is played 5 times (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default 3)")
    choice = parser.parse_args()
    attention.register()
    policy = Policy(small_model(attention=attention.NAME), compute=torch.float32)
    once = plan(choice.questions, 5, seed=1)
    twice = once + [in_other_words(game) for game in once]
    walls: dict[str, list[float]] = {"once": [], "twice": []}
    cpus: dict[str, list[float]] = {"once": [], "twice": []}
    turns = []
    for number in range(choice.rounds):
        for name, games in (("once", once), ("twice", twice)):
            run = measured(lambda games=games: play_ours(policy, games, latency=False))
            walls[name].append(run.wall)
            cpus[name].append(run.cpu)
            print(f"  round {number + 1}  {name:<6} {run.wall:7.2f} s wall {run.cpu:7.2f} s CPU", flush=True)
        turns.append(decode_by_turn(policy, 5 * choice.questions))
        print("  ms a token:", *(f"{whole:.3f} ({apart:.3f})" for whole, apart in turns[-1]), flush=True)
    whole, apart = (
        [round(median(round_[turn][part] for round_ in turns), 4) for turn in range(TURNS)] for part in (0, 1)
    )
    print(json.dumps({
        "twice_the_games": round(median(walls["twice"]) / median(walls["once"]), 3),
        "twice_the_games_cpu": round(median(cpus["twice"]) / median(cpus["once"]), 3),
        "decode_ms_per_token": whole,
        "without_attention": apart,
        "fifth_to_first_without_attention": round(apart[-1] / apart[0], 3),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
