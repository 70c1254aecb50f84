"""Games of TextArena (Guertler et al. 2025, arXiv 2504.11442) with a secret.

The agent asks by moving ("[10]"), their game replies, and the answer is the secret. A reply is a function of
the messages and of the question's id: the game is started anew from its seed, and all moves are made again.
So calls can be recorded, and a run resumes bit for bit.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.tasks.packages import TEXTARENA, check_known, import_package, parse_data_args, split_of
from prompt_r1.types import Message, Question

SECRETS = {"GuessTheNumber": "game_number", "Mastermind": "secret_code"}  # in the state of the game
GAME_ID = -1  # the sender of the game's own messages
OVER = "The game is over."
ASK = (
    "Each of your prompts is a move, and nothing but the move is needed, in its brackets. When you know the "
    "secret, answer it, without brackets."
)


def arena_questions(game: str, split: str, seed: int, args: str) -> list[Question]:
    """Games with other secrets as questions. Raises UsageError for an unknown game or wrong `args`."""
    part, questions = split_of(game, split, seed, args), []
    for index in range(part.size):
        with isolated_random():
            env = _start(game, part.seed + index, part.args)
        _, [(_, rules, _), *_] = env.get_observation()
        secret = env.state.game_state[_secret_of(game)]
        gold = " ".join(map(str, secret)) if isinstance(secret, list) else str(secret)
        questions.append(Question(f"{game}/{part.seed}/{index}", game, f"{rules.strip()}\n{ASK}", (gold,)))
    return questions


class TextArenaEnvironment:
    """Replies to the moves of a game as TextArena does."""

    name = TEXTARENA

    def __init__(self, args: str) -> None:
        """`args`: --data-args, with which the questions were made."""
        import_package(TEXTARENA)
        self._args = {name: value for name, value in parse_data_args(args).items() if name != "size"}

    async def ask(self, messages: list[Message], session: str = "") -> str:
        """Play all moves so far. A coroutine, because a thread would not be alone with the random state."""
        game, seed, index = [*session.rsplit("/", 2), "", ""][:3]
        if not (seed.isdigit() and index.isdigit()):
            raise UsageError(f"--env {TEXTARENA} plays the questions of --data {TEXTARENA}:GAME only")
        moves = [message["content"] for message in messages if message["role"] == "user"]
        with isolated_random():
            env = _start(game, int(seed) + int(index), self._args)
            env.get_observation()  # the rules
            return [_reply(env, move) for move in moves][-1]


def _reply(env: Any, move: str) -> str:
    """Make a move; what the game says about it."""
    if env.state.done:
        return OVER
    done, _ = env.step(move)
    if done:
        _, info = env.close()
        return str(info[0].get("reason") or OVER)
    _, messages = env.get_observation()
    return "\n".join(str(text).strip() for sender, text, _ in messages if sender == GAME_ID)


def _start(game: str, seed: int, args: Mapping[str, Any]) -> Any:
    """A new game. "-raw": without their wrappers, which repeat the whole dialogue in each reply."""
    package = import_package(TEXTARENA)
    registered = [name.removesuffix("-raw") for name in package.envs.registration.ENV_REGISTRY]
    check_known(TEXTARENA, game, {name for name in registered if _secret_of(name) and "-train" not in name})
    try:
        env = package.make(f"{game}-raw", **args)
        env.reset(num_players=1, seed=seed)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--data-args for {TEXTARENA}:{game}: {error}") from None
    return env


def _secret_of(game: str) -> str:
    """The name of the secret in the state of a game; "" for games without a known one."""
    return SECRETS.get(game.partition("-")[0], "")


@contextmanager
def isolated_random() -> Iterator[None]:
    """Restore the state of the global generator, which their games seed and draw from."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
