"""Open a pair of agent and environment, and play one question for a person.

`prompt_r1.load(…).ask("…")` takes these steps:

    load: `load` → `open_pair` → `load_agent` (agent.py)
    ask:  `Pair.ask` → `AsyncPair.play` → `play_question` (agent.py) → `rollout.play`
"""

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prompt_r1.chat_template import encodable
from prompt_r1.environments.budget import FREE, check_usd_limit
from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.own import Answering
from prompt_r1.environments.specs import open_environment, open_own
from prompt_r1.errors import EnvError, UsageError
from prompt_r1.model.machine import pick_device, use_threads
from prompt_r1.pair.agent import (
    NO_LIMITS,
    Agent,
    Limits,
    Sampling,
    check_question_length,
    load_agent,
    load_codec,
    play_question,
)
from prompt_r1.pair.dialogue import OnPiece, Piece
from prompt_r1.pair.loop_thread import LoopThread, result_of
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.pair.settings import AnyPairConfig, ChosenPair, PairConfig, choose_pair
from prompt_r1.settings.fields import NOT_NEGATIVE, check_number
from prompt_r1.types import Question, Trajectory


@dataclass(frozen=True)
class AsyncPair:
    """A loaded agent, and the environment that it questions: the pair of infer.py and of the server."""

    agent: Agent
    environment: Environment
    seed: int
    temperature: float
    path: str  # folder or hub id of the agent
    about: str  # one line: which agent plays with which environment

    async def play(
        self,
        text: str,
        *,
        limits: Limits = NO_LIMITS,
        seed: int | None = None,
        temperature: float | None = None,
        on_piece: OnPiece | None = None,
    ) -> Trajectory:
        """Play one game within limits, with the pair's seed and temperature unless others are given.

        Raises QuestionTooLong, LimitReached, and what `Environment.ask` raises except EnvError: after a
        failed call, the game's `stop` is "env_error".
        """
        agent = self.agent
        text = encodable(text)
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
            on_piece=on_piece,
        )


def asked_question(text: str) -> Question:
    """The question that a person asks. It has no gold answers, and its text is its id."""
    return Question(id=text, dataset="asked", text=text, answers=())


def raise_for_env_error(game: Trajectory) -> None:
    """Raise EnvError if the environment failed in a game."""
    if game.stop == "env_error":
        raise EnvError(game.error)


async def open_pair(chosen: ChosenPair[AnyPairConfig]) -> AsyncPair:
    """Open an agent and its environment, and check both before a large agent is loaded.

    Loading the agent blocks the event loop. From now on torch computes in as many threads as in the agent's
    training, or in fewer if there are fewer cores. Raises UsageError if the pair cannot play.
    """
    config, named = chosen.config, chosen.agent.built()
    seed = named.config.seed if config.seed is None else config.seed
    device = pick_device(config.device)
    use_threads(of_agent=named.config.threads)
    # The tokenizer is loaded first, so that a missing agent is reported before a missing key.
    load_codec(named.path, named.config)
    if chosen.own is None:
        environment = open_environment(config.env, config, trusted=chosen.trusted, seed=seed, device=device)
    else:
        environment = open_own(chosen.own, config, seed=seed)
    await check_servers(environment)
    agent = load_agent(named.path, named.config, device)
    about = named.describe(environment=environment.name, seed=seed)
    return AsyncPair(agent, environment, seed, config.temperature, str(named.path), about)


class Pair:
    """An `AsyncPair` for code that is not asynchronous. As a context manager, it closes itself.

    All its games run in one event loop, which has a thread of its own. So its methods may be called while
    another loop runs, as in a notebook, and the games of several threads share the batch of the engine.
    """

    def __init__(self, pair: AsyncPair, loop: LoopThread) -> None:
        self.environment = pair.environment.name
        self._pair = pair
        self._loop = loop

    def ask(self, question: str, *, limits: Limits = NO_LIMITS) -> Trajectory:
        """Play one game, and return it with its `answer`, `turns`, `spent` and `seconds`.

        The answer is None if the game ended without one. Raises EnvError if the environment failed,
        LimitReached, and UsageError for an empty question, a limit that cannot be kept, or a closed pair.
        """
        self._check(question, limits)
        game = self._loop.run(self._pair.play(question, limits=limits))
        raise_for_env_error(game)
        return game

    def stream(self, question: str, *, limits: Limits = NO_LIMITS) -> Iterator[Piece | Trajectory]:
        """Yield the dialogue in pieces while it is played, and at last the game. Raises what `ask` raises.

        The game begins with the first piece that is read. Closing the iterator cancels the game.
        """
        self._check(question, limits)
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        playing = self._loop.start(self._pair.play(question, limits=limits, on_piece=pieces.put))
        playing.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            game = result_of(playing)
            raise_for_env_error(game)
            yield game
        finally:
            playing.cancel()  # has no effect on a game that has ended

    def _check(self, question: object, limits: Limits) -> None:
        """Raise UsageError for an empty question, and for a limit of dollars that cannot be kept."""
        if not isinstance(question, str):
            raise UsageError(f"the question must be a text, not {type(question).__name__}")
        if not question.strip():
            raise UsageError("the question is empty")
        if limits.usd is None:
            return
        members = self._pair.environment.members
        check_usd_limit(
            "Limits(usd=…)",
            [member.price for member in members],
            [member.source.reply_limit for member in members if member.price != FREE],
        )

    def close(self) -> None:
        """Cancel the games, close the connections, and end the thread. The pair cannot be used afterwards."""
        self._loop.close(self._pair.environment.close).result()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def load(
    agent: str | Path = "",
    *,
    env: str | Answering = "",
    env_price: str = "",
    env_args: str = "",
    max_env_usd: float = 0.0,
    seed: int | None = None,
    temperature: float = 0.0,
    device: str = "auto",
) -> Pair:
    """Load an agent and open its environment.

    `agent` is a run folder, model folder, hub id or `mini`; by default, the newest mini run. `env` is a SPEC
    as for --env, or any object with `ask(messages) -> str`; by default, the environment of the agent's
    training. The other arguments are the flags of infer.py with these names.

    Raises UsageError if the pair cannot play.
    """
    config = PairConfig(
        agent=str(agent),
        env=env if isinstance(env, str) else "",
        env_price=(env_price,) if env_price else (),
        env_args=env_args,
        max_env_usd=max_env_usd,
        seed=seed,
        temperature=temperature,
        device=device,
    )
    # The ranges of the flags.
    check_number("max_env_usd", max_env_usd, NOT_NEGATIVE)
    check_number("temperature", temperature, NOT_NEGATIVE)
    named = resolve_agent(config.agent)
    if isinstance(env, str):
        # Of the settings that a pair takes from the agent's training, only env_args is an argument of `load`.
        chosen = choose_pair(config, ["env_args"] if env_args else [], named)
    else:
        chosen = ChosenPair(named, config, own=env)
    loop = LoopThread()
    try:
        return Pair(loop.run(open_pair(chosen)), loop)
    except BaseException:
        loop.close()
        raise
