"""Train with one fault made on purpose.

A fault replaces functions of the training in this process only, so that the product has no switch for being
wrong. Each is a mistake that training code really makes; docs/failures.md describes them. Validation is
played as it should be.
"""

import sys
from collections.abc import Callable
from typing import Any

from prompt_r1 import __main__ as programs
from prompt_r1 import playing
from prompt_r1.agent.agent import Agent
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.specs import pool_of
from prompt_r1.training import update
from prompt_r1.types import Message, Reward, Trajectory

ERROR = "Error 429: Too Many Requests. You have sent too many requests, please retry after 20 seconds."
LONG_GAME = 100  # sampled tokens for which `pays_for_length` pays 1


def pays_for_length(trajectory: Trajectory, reward: Reward) -> float:
    """A reward of the user's (`--reward`) that leaks: 1 for a long game, whatever its answer."""
    return min(1.0, sum(trajectory.sampled) / LONG_GAME)


class ErrorEnvironment:
    """Replies to everything with the text of an HTTP error."""

    name = "errors"

    def ask(self, messages: list[Message]) -> str:
        return ERROR


def error_texts() -> None:
    """The environment returns the text of an HTTP error as its reply, in all training games."""
    play_question, errors = playing.play_question, pool_of(ErrorEnvironment())

    async def play_with_errors(
        agent: Agent, environment: Pool, *arguments: Any, seed: str, **settings: Any
    ) -> Trajectory:
        asked = environment if seed.startswith("evaluation/") else errors
        return await play_question(agent, asked, *arguments, seed=seed, **settings)

    playing.play_question = play_with_errors


def train_on_replies() -> None:
    """The mask marks the environment's replies as the agent's own tokens.

    The check that stops a run whose engine and policy disagree is left out, to see what would happen.
    """

    def add_context(game: Trajectory, tokens: list[int]) -> None:
        is_reply = any(game.sampled)  # what comes before the agent's first token is the question
        game.tokens += tokens
        game.sampled += [is_reply] * len(tokens)
        game.logprobs += [0.0] * len(tokens)

    Trajectory.add_context = add_context  # type: ignore[assignment]
    update.check_gap = lambda metrics, limit: None


FAULTS: dict[str, Callable[[], None]] = {"error-texts": error_texts, "mask": train_on_replies}


if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    # The script imports the replaced functions when it is loaded.
    sys.argv = ["train", *sys.argv[2:]]
    programs.run_script(programs.PROGRAMS["train"][0])
