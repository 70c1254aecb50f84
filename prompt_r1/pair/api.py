"""A trained agent and its environment, from Python: `prompt_r1.load(…).ask("…")`.

All games of a pair run in one event loop, which has its own thread. A notebook already runs a loop, which
cannot be entered again. And questions from several threads must share the engine's batch.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

from prompt_r1.environments.budget import FREE
from prompt_r1.environments.own import Answering
from prompt_r1.errors import UsageError
from prompt_r1.pair.agent import NO_LIMITS, Limits
from prompt_r1.pair.dialogue import Piece
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.pair.playing import OpenPair, open_pair, raise_for_env_error
from prompt_r1.pair.settings import PairConfig
from prompt_r1.types import Trajectory

T = TypeVar("T")

CLOSED = "this pair is closed: load it again"


class Pair:
    """A loaded agent and the environment that it questions. As a context manager, it closes itself.

    Its methods may be called from several threads at once, and while an event loop runs.
    """

    def __init__(self, pair: OpenPair, loop: "LoopThread") -> None:
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

        Closing the iterator cancels the game.
        """
        self._check(question, limits)
        self._loop.check_open()
        return self._stream(question, limits)

    def _check(self, question: object, limits: Limits) -> None:
        """Raise UsageError for an empty question, and for a limit of dollars that cannot be kept."""
        if not isinstance(question, str):
            raise UsageError(f"the question must be a text, not {type(question).__name__}")
        if not question.strip():
            raise UsageError("the question is empty")
        if limits.usd is None:
            return
        members = self._pair.environment.members
        if all(member.price == FREE for member in members):
            raise UsageError(
                "Limits(usd=…) needs env_price of `load`: without a price, dollars are not counted"
            )
        if any(member.source.reply_limit is None for member in members):
            raise UsageError(
                "Limits(usd=…) needs a limit of each reply, such as env_args='{\"max_tokens\": 1024}' of "
                "`load`: without it, nobody knows what the next call will cost"
            )

    def _stream(self, question: str, limits: Limits) -> Iterator[Piece | Trajectory]:
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        playing = self._loop.start(self._pair.play(question, limits=limits, on_piece=pieces.put))
        playing.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            game = _result_of(playing)
            raise_for_env_error(game)
            yield game
        finally:
            playing.cancel()  # has no effect on a game that has ended

    def close(self) -> None:
        """Cancel the games, close the connections, and end the thread. The pair cannot be used afterwards."""
        ending = self._loop.close(self._pair.environment.close)
        if ending is not None:
            ending.result()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LoopThread:
    """An event loop in a daemon thread: a program does not wait for this thread at its end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._starting = threading.Lock()
        threading.Thread(target=self._run, name="prompt-r1", daemon=True).start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work in the loop. Raises UsageError if the loop has been closed."""
        # Locked, because work that starts after the loop has stopped would never end.
        with self._starting:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise UsageError(CLOSED)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work. Ctrl-C cancels it."""
        future = self.start(work)
        try:
            return _result_of(future)
        finally:
            future.cancel()  # has no effect on work that has ended

    def check_open(self) -> None:
        """Raise UsageError if the loop has been closed."""
        if self._is_closed:
            raise UsageError(CLOSED)

    def close(self, disconnect: Callable[[], Awaitable[None]] | None = None) -> Future[None] | None:
        """Cancel the work that runs, then call `disconnect`, and end the thread.

        Returns a future that is done when the connections are closed; None if the loop was closed before.
        """
        with self._starting:
            if self._is_closed:
                return None
            self._is_closed = True
            ending = asyncio.run_coroutine_threadsafe(self._cancel_all(disconnect), self._loop)
        ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        return ending

    async def _cancel_all(self, disconnect: Callable[[], Awaitable[None]] | None) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # No call runs any more, so the connections can be closed.
        if disconnect is not None:
            await disconnect()


def _result_of(future: Future[T]) -> T:
    try:
        return future.result()
    except CancelledError:
        raise UsageError("the pair was closed while it played this question") from None


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

    Raises UsageError or FatalEnvError if the pair cannot play.
    """
    if isinstance(env, str):
        spec, own = env, None
    else:
        spec, own = "", env
    config = PairConfig(
        agent=str(agent),
        env=spec,
        env_price=(env_price,) if env_price else (),
        env_args=env_args,
        max_env_usd=max_env_usd,
        seed=seed,
        temperature=temperature,
        device=device,
    )
    named = resolve_agent(config.agent)
    loop = LoopThread()
    try:
        return Pair(loop.run(open_pair(config, named, own)), loop)
    except BaseException:
        loop.close()
        raise
