"""A game of TextArena (`pip install textarena`): the agent asks by moving, and its answer is the secret.

    python train.py --config mini --agent AGENT --data py:examples.text_arena_game:questions \
        --env py:examples.text_arena_game:Game --max-turns 5

Each call replays the whole game from its seed. So a reply depends only on the messages and the question's id,
and the journal may record it. TextArena is by Guertler et al. 2025, arXiv 2504.11442.
"""

import random
from collections.abc import Iterator
from typing import Any

from prompt_r1.environments.sources import Caller
from prompt_r1.types import Message

GAME, SECRET = "GuessTheNumber-v0", "game_number"  # or "Mastermind-v0", "secret_code"
SIZES = {"train": 1_000, "validation": 100, "test": 200}
SEEDS_OF_A_SPLIT = 1_000_000
ASK = (
    "Each of your prompts is a move, and nothing but the move is needed, in its brackets. When you know the "
    "secret, answer it, without brackets."
)


def questions(split: str, seed: int) -> Iterator[dict[str, str]]:
    """The games of a split as rows. No two splits share a seed."""
    first_seed = (seed * len(SIZES) + list(SIZES).index(split)) * SEEDS_OF_A_SPLIT
    for game_seed in range(first_seed, first_seed + SIZES[split]):
        random_state = random.getstate()  # TextArena's games seed the global generator.
        env = start(game_seed)
        random.setstate(random_state)
        _, [(_, rules, _), *_] = env.get_observation()
        secret = env.state.game_state[SECRET]
        gold = " ".join(map(str, secret)) if isinstance(secret, list) else str(secret)
        text = f"{rules.strip()}\n{ASK}"
        yield {"id": f"{GAME}/{game_seed}", "dataset": GAME, "question": text, "answer": gold}


class Game:
    """Replies to the moves of a game as TextArena does."""

    async def ask(self, messages: list[Message], caller: Caller) -> str:
        """Play all moves so far. The id of the caller's question ends with the seed of its game.

        A method without `async` would be called in a thread, and threads share Python's global random state.
        """
        random_state = random.getstate()
        env = start(int(caller.question.rpartition("/")[2]))
        env.get_observation()  # the rules
        replies = [reply_to(env, message["content"]) for message in messages if message["role"] == "user"]
        random.setstate(random_state)
        return replies[-1]


def reply_to(env: Any, move: str) -> str:
    """Make a move, and return what the game says about it."""
    if env.state.done:
        return "The game is over."
    done, _ = env.step(move)
    if done:
        _, info = env.close()
        return str(info[0].get("reason") or "The game is over.")
    _, messages = env.get_observation()
    return "\n".join(str(text).strip() for sender, text, _ in messages if sender == -1)  # -1: the game


def start(seed: int) -> Any:
    """A new game. "-raw" leaves out TextArena's wrappers, which repeat the whole dialogue in each reply."""
    import textarena

    env = textarena.make(f"{GAME}-raw")
    env.reset(num_players=1, seed=seed)
    return env
