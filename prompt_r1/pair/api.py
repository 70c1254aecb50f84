"""Open a pair of agent and environment, and play one question for a person.

`prompt_r1.load(…).ask("…")` takes these steps:

    load: `load` → `Pair` → `open_pair` → `load_agent` (agent.py)
    ask:  `Pair.ask` → `AsyncPair.play` → `play_question` (agent.py) → `rollout.play`
"""

import asyncio
import math
import queue
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prompt_r1.chat_template import encodable
from prompt_r1.environments.budget import Bill
from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.own import Answering
from prompt_r1.environments.specs import check_environment, open_environment
from prompt_r1.errors import EnvError, UsageError
from prompt_r1.model.machine import pick_device, use_threads
from prompt_r1.pair.agent import Agent, Sampling, check_question_length, load_agent, play_question
from prompt_r1.pair.dialogue import OnPiece, Piece
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.pair.settings import AnyPairConfig, ChosenPair, PairConfig, choose_pair
from prompt_r1.settings.fields import check_config
from prompt_r1.types import Question, Trajectory


@dataclass(frozen=True)
class Limits:
    """The most that one question may cost. None means no limit.

    Dollars include requests without a reply that may be billed. Raises UsageError for dollars that are not
    above 0.
    """

    usd: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.usd is not None and not self.usd > 0:  # also for NaN
            raise UsageError("Limits(usd=…) must be above 0")


NO_LIMITS = Limits()


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

        Raises QuestionTooLong, LimitReached before a request that may exceed the dollars, TimeoutError when
        the time is over, and what `Environment.ask` raises except EnvError: after a failed call, the game's
        `stop` is "env_error".
        """
        agent = self.agent
        text = encodable(text)
        # In a thread, because a long text takes seconds to encode, and other games wait for this event loop.
        await asyncio.to_thread(check_question_length, text, agent.codec, agent.game)
        sampling = Sampling(
            seed=str(self.seed if seed is None else seed),
            temperature=self.temperature if temperature is None else temperature,
        )
        bill = Bill(max_usd=math.inf if limits.usd is None else limits.usd)
        async with asyncio.timeout(limits.seconds):
            return await play_question(
                agent, self.environment, asked_question(text), sampling, bill=bill, on_piece=on_piece
            )


def asked_question(text: str) -> Question:
    """The question that a person asks. It has no gold answers, and its text is its id."""
    return Question(id=text, dataset="asked", text=text, answers=())


def raise_for_env_error(game: Trajectory) -> None:
    """Raise EnvError if the environment failed in a game."""
    if game.stop == "env_error":
        raise EnvError(game.error)


async def open_pair(chosen: ChosenPair[AnyPairConfig]) -> AsyncPair:
    """Open an environment and its agent. The servers are checked before a large agent is loaded.

    From now on torch computes in as many threads as in the agent's training, or in fewer if there are fewer
    cores. Raises UsageError if the pair cannot play.
    """
    config, named = chosen.config, chosen.agent
    path = named.make(named.config.seed)
    seed = named.config.seed if config.seed is None else config.seed
    device = pick_device(config.device)
    use_threads(in_training=named.config.threads)
    environment = open_environment(chosen.environment, seed=seed, device=device)
    await check_servers(environment)
    agent = load_agent(path, named.config, device)
    about = named.describe(environment=environment.name, seed=seed)
    return AsyncPair(agent, environment, seed, config.temperature, str(path), about)


def _game_of(playing: Future[Trajectory]) -> Trajectory:
    """Wait for a game. Raises EnvError if the environment failed, and UsageError if it was cancelled."""
    try:
        game = playing.result()
    except CancelledError:
        raise UsageError("the pair was closed while it played this question") from None
    raise_for_env_error(game)
    return game


class Pair:
    """An `AsyncPair` for code that is not asynchronous. As a context manager, it closes itself.

    It is opened and plays all its games in one event loop, which has a thread of its own. So its methods may
    be called while another loop runs, as in a notebook, and the games of several threads share the batch of
    the engine.
    """

    def __init__(self, opening: Coroutine[Any, Any, AsyncPair]) -> None:
        self._loop = asyncio.new_event_loop()
        # A program does not wait for a daemon thread at its end.
        self._thread = threading.Thread(target=self._loop.run_forever, name="prompt-r1", daemon=True)
        self._thread.start()
        # A game that started while the loop is being stopped would never end.
        self._lock = threading.Lock()
        try:
            self._pair = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        except BaseException:
            self._end_thread()
            raise
        self.environment = self._pair.environment.name

    def ask(self, question: str, *, limits: Limits = NO_LIMITS) -> Trajectory:
        """Play one game, and return it with its `answer`, `turns`, `spent` and `seconds`.

        The answer is None if the game ended without one. Raises EnvError if the environment failed,
        LimitReached before a request that may exceed the dollars, TimeoutError when the time is over, and
        UsageError for a limit that cannot be kept, or a closed pair.
        """
        playing = self._start(question, limits)
        try:
            return _game_of(playing)
        finally:
            playing.cancel()  # after Ctrl-C; it has no effect on a game that has ended

    def stream(self, question: str, *, limits: Limits = NO_LIMITS) -> Iterator[Piece | Trajectory]:
        """Yield the dialogue in pieces while it is played, and at last the game. Raises what `ask` raises.

        The game begins with the first piece that is read. Closing the iterator cancels the game.
        """
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        playing = self._start(question, limits, on_piece=pieces.put)
        playing.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            yield _game_of(playing)
        finally:
            playing.cancel()

    def _start(self, question: str, limits: Limits, on_piece: OnPiece | None = None) -> Future[Trajectory]:
        """Start a game in the loop. Raises UsageError for dollars without a price, and for a closed pair."""
        if limits.usd is not None:
            self._pair.environment.check_usd_limit("Limits(usd=…)")
        with self._lock:
            if self._loop.is_closed():
                raise UsageError("this pair is closed: load it again")
            game = self._pair.play(question, limits=limits, on_piece=on_piece)
            return asyncio.run_coroutine_threadsafe(game, self._loop)

    def close(self) -> None:
        """Cancel the games, close the connections, and end the thread. The pair cannot be used afterwards."""
        with self._lock:
            if self._loop.is_closed():
                return
            try:
                asyncio.run_coroutine_threadsafe(self._end_games(), self._loop).result()
            finally:
                self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_games(self) -> None:
        games = asyncio.all_tasks() - {asyncio.current_task()}
        for game in games:
            game.cancel()
        await asyncio.gather(*games, return_exceptions=True)
        # No call runs any more, so the connections can be closed.
        await self._pair.environment.close()

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
    max_turns: int = 0,
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
        max_turns=max_turns,
        device=device,
    )
    check_config(config)
    named = resolve_agent(config.agent, max_turns=max_turns)
    if isinstance(env, str):
        # A pair takes env_system, env_args and route from the agent's training, unless they are given. Of
        # these settings, `load` has only env_args.
        given = ["env_args"] if env_args else []
        chosen = choose_pair(config, given, named)
    else:
        chosen = ChosenPair(named, config, check_environment(env, config))
    return Pair(open_pair(chosen))
