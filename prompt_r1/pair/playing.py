"""Open a pair, and play one question for a person, within limits. The person can watch the game."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.own import Answering
from prompt_r1.environments.specs import open_environment, open_own, trusted_names
from prompt_r1.errors import EnvError
from prompt_r1.model.distributed import pick_device
from prompt_r1.model.machine import limit_threads
from prompt_r1.pair.agent import (
    NO_LIMITS,
    Agent,
    Limits,
    Sampling,
    check_question_length,
    load_agent,
    load_codec,
    play_question,
    with_threads_of_this_machine,
)
from prompt_r1.pair.dialogue import Piece, Pieces
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.pair.settings import PairConfig, with_environment
from prompt_r1.types import Question, Trajectory


@dataclass(frozen=True)
class OpenPair:
    """A loaded agent, and the environment that it questions."""

    agent: Agent
    environment: Environment
    seed: int
    temperature: float
    path: str = ""  # folder or hub id of the agent
    about: str = ""  # one line: which agent plays with which environment

    async def play(
        self,
        text: str,
        *,
        limits: Limits = NO_LIMITS,
        seed: int | None = None,
        temperature: float | None = None,
        on_piece: Callable[[Piece], object] | None = None,
    ) -> Trajectory:
        """Play one game within limits, with the pair's seed and temperature unless others are given.

        `on_piece` gets the dialogue while it is played. Raises QuestionTooLong, LimitReached, and what
        `Environment.ask` raises except EnvError: after a failed call, the game's `stop` is "env_error".
        """
        agent = self.agent
        text = text.encode("utf-8", "replace").decode()  # A lone surrogate has no UTF-8 and becomes "?".
        # In a thread, because a long text takes seconds to encode, and other games wait for this event loop.
        await asyncio.to_thread(check_question_length, text, agent.codec, agent.game)
        return await play_question(
            agent,
            self.environment,
            asked_question(text),
            Sampling(
                seed=str(self.seed if seed is None else seed),
                temperature=self.temperature if temperature is None else temperature,
            ),
            limits=limits,
            pieces=None if on_piece is None else Pieces(agent.codec.turn_text, on_piece),
        )


def asked_question(text: str) -> Question:
    """The question that a person asks. It has no gold answers, and its text is its id."""
    return Question(id=text, dataset="asked", text=text, answers=())


def raise_for_env_error(game: Trajectory) -> None:
    """Raise EnvError if the environment failed in a game."""
    if game.stop == "env_error":
        raise EnvError(game.error)


async def open_pair(config: PairConfig, named: NamedAgent, own: Answering | None = None) -> OpenPair:
    """Open an agent and its environment, and check both before a large agent is loaded.

    `named` is the agent that `resolve_agent` found for these settings. `own` is an object of the user that
    replaces the environment of a SPEC. Loading the agent blocks the event loop. From now on torch computes in
    no more threads than this process has cores. Raises UsageError or FatalEnvError if the pair cannot play.
    """
    named = named.built()
    seed = named.config.seed if config.seed is None else config.seed
    device = pick_device(config.device)
    limit_threads()
    # The tokenizer is loaded first, so that a missing agent is reported before a missing key.
    load_codec(named.path, named.config)
    if own is None:
        settings = with_environment(config, named.config)
        trusted = trusted_names(typed=[config.env], opened=[settings.env])
        environment = open_environment(settings.env, settings, trusted=trusted, seed=seed, device=device)
    else:
        environment = open_own(own, config, seed=seed)
    await check_servers(environment)
    agent = load_agent(named.path, with_threads_of_this_machine(named.config), device)
    about = named.describe(environment=environment.name, seed=seed)
    return OpenPair(agent, environment, seed, config.temperature, str(named.path), about)
