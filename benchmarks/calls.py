"""What calls of an endpoint cost when many games run at once, against the mini world in a process of its own.

    OMP_NUM_THREADS=1 python -m benchmarks.calls [--games 64 256 1000] [--latency 0.5] [--fail 0]

Each game is played by `rollout.play` with a scripted agent that asks three times and answers; all games call
at once, with the journal and the budget of a run. Measured for each number of games: the CPU time of this
process for each call (tokenizer, game, client and journal), the longest time in which the event loop ran
nothing else, as wall and as CPU time, the most descriptors that were open, and the peak memory. On a machine
with other load, the CPU times are the meaningful ones. The last line is JSON.
"""

import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch

from benchmarks.measuring import make_parser, memory
from prompt_r1.config.environment import EnvironmentConfig
from prompt_r1.data.questions import find_questions
from prompt_r1.distributed import Ranks
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.specs import Environments
from prompt_r1.miniworld.tokenizer import train_tokenizer
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.rollout import play, play_groups
from prompt_r1.types import Completion, GameSettings, Question, Trajectory

CALLS = 3  # of a game
GROUP = 5  # games of a question
TICK = 0.005  # seconds between two looks at the event loop


@dataclass
class Load:
    """What was measured while the games of one round ran."""

    games: int
    calls: int = 0
    failed: int = 0  # games whose environment failed for good
    wall: float = 0.0  # seconds
    cpu_ms: float = 0.0  # milliseconds of this process for each call
    lag: float = 0.0  # seconds: the longest time in which the event loop did not come round
    lag_cpu: float = 0.0  # CPU seconds of this process in one round of the event loop
    descriptors: int = 0
    megabytes: float = 0.0  # peak


class AskingAgent:
    """Asks the question CALLS times, then answers."""

    def __init__(self, codec: Codec, question: str) -> None:
        self._codec = codec
        self._question = question
        self._turn = 0

    async def generate(self, tokens: list[int], *, max_new: int, seed: str) -> Completion:
        self._turn += 1
        tag, text = ("answer", "Anna") if self._turn > CALLS else ("interaction_prompt", self._question)
        turn = f"<think>Turn {self._turn}.</think>\n<{tag}>{text}</{tag}>"
        new = [*self._codec.encode_untrusted(turn), self._codec.turn_end]
        return Completion(new, [-0.5] * len(new), finished=True)


@contextmanager
def served_mini_world(*, latency: float, fail: float) -> Iterator[str]:
    """Serve the mini world in a process of its own; yields its URL."""
    line = [sys.executable, "-m", "tests.support.mini_server", "--port", "0"]
    line += ["--latency", str(latency), "--fail", str(fail)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


async def watch(load: Load) -> None:
    """Measure the lag of the event loop, and count descriptors, until cancelled."""
    loop = asyncio.get_running_loop()
    looks = 0
    while True:
        wall, cpu = loop.time(), time.process_time()
        await asyncio.sleep(TICK)
        load.lag = max(load.lag, loop.time() - wall - TICK)
        load.lag_cpu = max(load.lag_cpu, time.process_time() - cpu)
        looks += 1
        if looks % 10 == 0:
            load.descriptors = max(load.descriptors, len(os.listdir("/proc/self/fd")))


async def play_at_once(pool: Pool, codec: Codec, questions: list[Question]) -> Load:
    """Play GROUP games of each question, all at once."""
    load = Load(GROUP * len(questions))
    settings = GameSettings(max_turns=CALLS + 1, max_tokens=4000, max_new=400)

    async def play_one(question: Question, seed: str, number: int) -> Trajectory:
        agent = AskingAgent(codec, question.text)
        ask = partial(pool.ask, sample=number, session=question.id)
        return await play(question, agent.generate, ask, codec, settings, seed=seed)

    watching = asyncio.create_task(watch(load))
    wall, cpu = time.perf_counter(), time.process_time()
    seeds = [question.id for question in questions]
    groups = await play_groups(questions, GROUP, play_one, seeds=seeds)
    load.wall = time.perf_counter() - wall
    seconds = time.process_time() - cpu
    watching.cancel()
    games = [game for group in groups for game in group]
    load.calls = sum(turn.latency > 0 for game in games for turn in game.turns)
    load.failed = sum(game.stop == "env_error" for game in games)
    load.cpu_ms = 1e3 * seconds / max(load.calls, 1)
    load.megabytes = memory()
    return load


def main() -> None:
    """Play each number of games, and print what it cost."""
    parser = make_parser(__doc__)
    parser.add_argument("--games", type=int, nargs="+", default=[64, 256, 1000], help="games at once")
    parser.add_argument("--latency", type=float, default=0.5, help="median seconds of a reply")
    parser.add_argument("--fail", type=float, default=0.0, help="share of requests that get a fault")
    choice = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    questions = find_questions(("mini",), "train", 0)
    tokenizer = train_tokenizer([question.text for question in questions], vocabulary=600)
    codec = Codec(tokenizer, INSTRUCTIONS["short"])
    ranks = Ranks(rank=0, count=1, device=torch.device("cpu"))
    gc.freeze()  # as run_program does for train.py
    loads: list[Load] = []
    with (
        served_mini_world(latency=choice.latency, fail=choice.fail) as url,
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner() as runner,
    ):
        for games in choice.games:
            config = EnvironmentConfig(env_concurrency=games, env_timeout=60)
            out = Path(folder) / str(games)
            pool = Environments(config, seed=0, folder=out, ranks=ranks).open(f"mini@{url}")
            asked = list(islice(cycle(questions), -(-games // GROUP)))
            loads.append(runner.run(play_at_once(pool, codec, asked)))
            print(loads[-1], flush=True)
    print(json.dumps([asdict(load) for load in loads]))


if __name__ == "__main__":
    main()
