"""Open a pair, and play one question for a person: with limits, and shown while it is played."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from prompt_r1.agent.agent import Agent, load_agent, load_codec
from prompt_r1.agent.names import AgentSpec
from prompt_r1.cli.dialogue import Piece, Pieces
from prompt_r1.config.agent import EnvironmentConfig
from prompt_r1.distributed import pick_device
from prompt_r1.environments.environment import Environment, Game, environment_of
from prompt_r1.environments.sources import Answering
from prompt_r1.environments.specs import open_for_agent
from prompt_r1.rollout import play
from prompt_r1.types import Completion, Message, Question, Trajectory


@dataclass(frozen=True)
class OpenPair:
    """An agent that is loaded, and the environment that it questions."""

    agent: Agent
    environment: Environment
    seed: int


def open_pair(
    spec: AgentSpec,
    env: str | Answering,
    calls: EnvironmentConfig,
    *,
    seed: int,
    device: str,
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> OpenPair:
    """Open an agent and its environment, and check both before a large agent is loaded.

    `env` is a SPEC ("": that of the agent's training) or an object with `ask`; `seed`: -1 for the seed of the
    training. `run` runs a check to its end. Raises UsageError or FatalEnvError if the pair cannot play.
    """
    seed = spec.config.seed if seed < 0 else seed
    load_codec(spec.path, spec.config)  # a missing agent is reported before the missing key of an environment
    place = pick_device(device)
    if isinstance(env, str):
        environment = open_for_agent(env, spec.config, calls, seed=seed, device=place)
    else:
        environment = environment_of(env)
    run(environment.check())
    return OpenPair(load_agent(spec.path, spec.config, place), environment, seed)


@dataclass(frozen=True)
class Limits:
    """The most that one question may cost (None: no limit), within the turns of the agent's training."""

    turns: int | None = None
    calls: int | None = None
    usd: float | None = None
    seconds: float | None = None


NO_LIMITS = Limits()


class LimitReached(Exception):
    """A question was given up, because its next call or second would exceed this limit."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


async def play_within(
    limits: Limits,
    agent: Agent,
    environment: Environment,
    question: Question,
    *,
    seed: str,
    temperature: float,
    on_piece: Callable[[Piece], object] | None = None,
    on_turn_end: Callable[[], object] = lambda: None,
) -> Trajectory:
    """Play one game as `rollout.play_question`, within limits. `on_piece` gets the dialogue; `on_turn_end` is
    called when the agent's turn is complete, before the environment is asked.

    Raises LimitReached, and what `Environment.ask` raises except EnvError: then `stop` is "env_error".
    """
    game, codec = Game(question.id), agent.codec
    pieces = Pieces(on_piece) if on_piece else None
    most_turns = (agent.game.max_turns, limits.turns, None if limits.calls is None else limits.calls + 1)
    turns = min(most for most in most_turns if most is not None)  # in its last turn, a game makes no call

    async def generate(tokens: list[int], *, max_new: int, seed: str) -> Completion:
        sampled: list[int] = []

        def watch(token: int) -> None:
            assert pieces is not None
            sampled.append(token)
            pieces.turn(codec.turn_text(sampled), ended=False)

        completion = await agent.engine.generate(
            tokens,
            max_new=max_new,
            seed=seed,
            game=handle,
            temperature=temperature,
            watch=watch if pieces else None,
        )
        if pieces:
            pieces.turn(codec.turn_text(completion.tokens), ended=True)
            on_turn_end()
        return completion

    async def ask(messages: list[Message]) -> str:
        spent = game.spent.usd
        if limits.usd is not None and spent + environment.most_usd(messages) > limits.usd:
            message = f"the next call may exceed the limit of ${limits.usd:g}; spent: ${spent:.6f}"
            raise LimitReached("usd", message)
        reply = await environment.ask(messages, game)
        if pieces:
            pieces.reply(reply)
        return reply

    begin, rules = time.perf_counter(), replace(agent.game, max_turns=turns)
    try:
        async with asyncio.timeout(limits.seconds):
            with agent.engine.new_game() as handle:
                trajectory = await play(question, generate, ask, codec, rules, seed=seed)
    except TimeoutError:
        raise LimitReached("seconds", f"no answer within the limit of {limits.seconds:g} s") from None
    trajectory.spent, trajectory.seconds = game.spent, time.perf_counter() - begin
    return trajectory
