"""Open a pair, and play one question for a person: with limits, and shown while it is played."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import torch

from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.environments.sources import Answering, OwnSource
from prompt_r1.environments.specs import open_environment
from prompt_r1.errors import EnvError
from prompt_r1.model.distributed import pick_device
from prompt_r1.pair.agent import Agent, check_question_lengths, load_agent, load_codec
from prompt_r1.pair.dialogue import Piece, Pieces
from prompt_r1.pair.settings import PairConfig
from prompt_r1.pair.trained import resolve_agent
from prompt_r1.protocol import ENVIRONMENT_SYSTEM
from prompt_r1.rollout import play
from prompt_r1.settings.agent import AgentConfig, EnvironmentConfig
from prompt_r1.types import Completion, Message, Question, Trajectory


@dataclass(frozen=True)
class Limits:
    """The most that one question may cost (None: no limit), within the turns of the agent's training."""

    turns: int | None = None  # one more than calls: in its last turn, a game makes none
    usd: float | None = None
    seconds: float | None = None


NO_LIMITS = Limits()


class LimitReached(Exception):
    """A question was given up, because its next call or second would exceed this limit."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True)
class OpenPair:
    """An agent that is loaded, and the environment that it questions."""

    agent: Agent
    environment: Environment
    seed: int
    temperature: float
    path: str = ""  # folder or hub id of the agent
    about: str = ""  # which agent plays where, in one line

    async def play(
        self,
        text: str,
        *,
        limits: Limits = NO_LIMITS,
        seed: int | None = None,
        temperature: float | None = None,
        on_piece: Callable[[Piece], object] | None = None,
        on_turn_end: Callable[[], object] = lambda: None,
    ) -> Trajectory:
        """Play one game within limits, with the pair's seed and temperature unless others are given.

        `on_piece` gets the dialogue; `on_turn_end` is called when the agent's turn is complete, before the
        environment is asked. Raises QuestionTooLong, LimitReached, and what `Environment.ask` raises except
        EnvError: then `stop` is "env_error".
        """
        agent, environment, codec = self.agent, self.environment, self.agent.codec
        text = text.encode("utf-8", "replace").decode()  # lone surrogates have no UTF-8
        question = Question(text, "asked", text, answers=())
        check_question_lengths([question], codec, agent.game)
        caller, pieces = Caller(question.id), Pieces(on_piece or (lambda piece: None))
        most = agent.game.max_turns if limits.turns is None else min(agent.game.max_turns, limits.turns)

        async def generate(tokens: list[int], *, max_new: int, seed: str) -> Completion:
            sampled: list[int] = []

            def watch(token: int) -> None:
                sampled.append(token)
                pieces.turn(codec.turn_text(sampled), ended=False)

            completion = await agent.engine.generate(
                tokens,
                max_new=max_new,
                seed=seed,
                game=handle,
                temperature=self.temperature if temperature is None else temperature,
                watch=watch if on_piece else None,
            )
            pieces.turn(codec.turn_text(completion.tokens), ended=True)
            on_turn_end()
            return completion

        async def ask(messages: list[Message]) -> str:
            spent = caller.spent.usd
            if limits.usd is not None and spent + environment.most_usd(messages) > limits.usd:
                message = f"the next call may exceed the limit of ${limits.usd:g}; spent: ${spent:.6f}"
                raise LimitReached("usd", message)
            reply = await environment.ask(messages, caller)
            pieces.reply(reply)
            return reply

        begin, rules = time.perf_counter(), replace(agent.game, max_turns=most)
        seed_text = str(self.seed if seed is None else seed)
        try:
            async with asyncio.timeout(limits.seconds):
                with agent.engine.new_game() as handle:
                    trajectory = await play(question, generate, ask, codec, rules, seed=seed_text)
        except TimeoutError:
            raise LimitReached("seconds", f"no answer within the limit of {limits.seconds:g} s") from None
        trajectory.spent, trajectory.seconds = caller.spent, time.perf_counter() - begin
        return trajectory


def answered(game: Trajectory) -> Trajectory:
    """The game. Raises EnvError if the environment failed in it."""
    if game.stop == "env_error":
        raise EnvError(game.error)
    return game


def open_pair(
    config: PairConfig, run: Callable[[Coroutine[Any, Any, None]], None], own: Answering | None = None
) -> OpenPair:
    """Open an agent and its environment, and check both before a large agent is loaded.

    `own` is an environment of the user's, in place of that of a SPEC. `run` runs a check to its end. Raises
    UsageError or FatalEnvError if the pair cannot play.
    """
    spec = resolve_agent(config.agent, max_turns=config.max_turns, max_new=config.max_new)
    seed, device = spec.config.seed if config.seed < 0 else config.seed, pick_device(config.device)
    load_codec(spec.path, spec.config)  # a missing agent is reported before the missing key of an environment
    if own is None:
        environment = open_for_agent(config.env, spec.config, config, seed=seed, device=device)
    else:
        environment = Environment([OwnSource(own, seed=0)])
    run(environment.check())
    agent = load_agent(spec.path, spec.config, device)
    about = spec.describe(environment=environment.name, seed=seed)
    return OpenPair(agent, environment, seed, config.temperature, str(spec.path), about)


def open_for_agent(
    spec: str, trained: AgentConfig, calls: EnvironmentConfig, *, seed: int, device: torch.device
) -> Environment:
    """Open the environment of the SPEC of a user; "": the one that the agent was trained with.

    `trained` are the settings of the agent's training, which may come from anyone.
    """
    system = calls.env_system if calls.env_system != ENVIRONMENT_SYSTEM else trained.env_system
    calls = replace(calls, env_args=calls.env_args or trained.env_args, env_system=system)
    return open_environment(spec or trained.env, calls, typed=[spec], seed=seed, device=device)
