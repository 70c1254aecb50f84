"""Print the peak memory in MB of this process, which plays or learns with a model on a CPU.

    python -m tests.training.process_memory FOLDER playing|update

"playing" is the first rollout, which fills the KV cache; "update" the second optimiser step, when AdamW's
moments exist. The frozen reference is not loaded.
"""

import asyncio
import gc
import random
import sys
from pathlib import Path

from benchmarks.measuring import memory
from benchmarks.workload import CPU, Lengths, learn_from, make_update, plan, random_games
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.loading import load_policy
from prompt_r1.agent.policy import Policy
from prompt_r1.distributed.ranks import Ranks

GAMES = 4  # of a question
PROMPT, NEW = 100, 8  # tokens of a game that is played
KV_TOKENS = GAMES * (PROMPT + NEW)
TOKENS = 160  # of a micro-batch


def peak_of_playing(policy: Policy) -> float:
    """MB at most, while games are played that fill the KV cache."""
    engine = Engine(policy, stop_ids=frozenset(), max_tokens=PROMPT + NEW, kv_tokens=KV_TOKENS)

    async def play() -> None:
        prompts = [random.Random(game).choices(range(1000), k=PROMPT) for game in range(GAMES)]
        await asyncio.gather(
            *(engine.generate(prompt, max_new=NEW, seed=str(game)) for game, prompt in enumerate(prompts))
        )

    gc.collect()
    memory(reset=True)
    asyncio.run(play())
    return memory()


def peak_of_update(policy: Policy) -> float:
    """MB at most in the second optimiser step, on games that make a micro-batch of about TOKENS."""
    update = make_update(policy, Ranks(0, 1, CPU), tokens_per_batch=TOKENS)
    part = TOKENS // (GAMES + 1)  # of the opening, and of each game
    lengths = Lengths(part, (1,), (part, part), (0, 0), 0.0, 0.0)
    for step in range(2):
        games = plan(1, GAMES, seed=step, lengths=lengths, vocabulary=1000)
        gc.collect()
        memory(reset=True)
        learn_from(update, random_games(games, 1000))
    return memory()


if __name__ == "__main__":
    policy = load_policy(Path(sys.argv[1]), device=CPU, check=False)
    policy.checkpoint_activations()
    print(peak_of_playing(policy) if sys.argv[2] == "playing" else peak_of_update(policy))
