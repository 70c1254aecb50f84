"""A trained agent and its environment, from Python: `prompt_r1.load(…).ask("…")`.

All games of a pair run in one event loop, in a thread of its own: a notebook already runs a loop, which
cannot be entered again, and questions from several places must share the engine's batch. This is the only
such thread of the package.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from prompt_r1.agent.agent import Agent
from prompt_r1.agent.names import resolve_agent
from prompt_r1.api.asking import Answer, Piece, ask_pair, raise_for_error
from prompt_r1.config.environment import EnvironmentConfig
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.sources import Answering
from prompt_r1.playing import NO_LIMITS, Limits, PlaySettings, open_pair

T = TypeVar("T")


class Pair:
    """An agent that is loaded, and the environment that it questions; a context manager.

    Each method has an asynchronous twin, which may be awaited in any event loop.
    """

    def __init__(
        self,
        agent: Agent,
        environment: Pool,
        *,
        name: str,
        seed: int,
        temperature: float,
        thread: "_LoopThread | None" = None,
    ) -> None:
        self.name = name
        self.environment = environment.name
        self._agent = agent
        self._pool = environment
        self._seed = seed
        self._temperature = temperature
        self._thread = thread or _LoopThread()

    def ask(self, question: str, *, limits: Limits = NO_LIMITS) -> Answer:
        """Play one game. Raises EnvError if the environment failed, and LimitReached."""
        return self._thread.call(self._ask(question, limits))

    async def ask_async(self, question: str, *, limits: Limits = NO_LIMITS) -> Answer:
        """`ask`, to be awaited."""
        return await asyncio.wrap_future(self._thread.submit(self._ask(question, limits)))

    def ask_all(self, questions: Sequence[str], *, limits: Limits = NO_LIMITS) -> list[Answer]:
        """Play one game of each question, all at once.

        A failure of the environment ends its own game only: look at `Answer.error`.
        """
        return self._thread.call(self._ask_all(questions, limits))

    async def ask_all_async(self, questions: Sequence[str], *, limits: Limits = NO_LIMITS) -> list[Answer]:
        """`ask_all`, to be awaited."""
        return await asyncio.wrap_future(self._thread.submit(self._ask_all(questions, limits)))

    def stream(self, question: str, *, limits: Limits = NO_LIMITS) -> Iterator[Piece | Answer]:
        """Yield the dialogue in pieces while it is played, and at last the answer. Raises as `ask`."""
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        future = self._thread.submit(self._ask(question, limits, pieces.put))
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            yield future.result()
        finally:
            future.cancel()

    async def stream_async(
        self, question: str, *, limits: Limits = NO_LIMITS
    ) -> AsyncIterator[Piece | Answer]:
        """`stream`, for `async for`."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(piece: Piece | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        future = self._thread.submit(self._ask(question, limits, put))
        future.add_done_callback(lambda _: put(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread. The pair cannot be used afterwards."""
        if self._thread.is_alive():
            self._thread.stop()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pair(agent={self.name!r}, environment={self.environment!r})"

    async def _ask(
        self, question: str, limits: Limits, on_piece: Callable[[Piece], object] | None = None
    ) -> Answer:
        return raise_for_error(await self._play(question, limits, on_piece))

    async def _ask_all(self, questions: Sequence[str], limits: Limits) -> list[Answer]:
        async with asyncio.TaskGroup() as group:  # the first error cancels the other games
            games = [group.create_task(self._play(question, limits, None)) for question in questions]
        return [game.result() for game in games]

    async def _play(
        self, question: str, limits: Limits, on_piece: Callable[[Piece], object] | None
    ) -> Answer:
        how = PlaySettings(self._temperature, limits=limits)
        return await ask_pair(self._agent, self._pool, question, how, seed=str(self._seed), on_piece=on_piece)


class _LoopThread(threading.Thread):
    """An event loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        super().__init__(target=self._loop.run_forever, name="prompt-r1", daemon=True)
        self.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work; Ctrl-C cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # has no effect on one that is done

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()
        self._loop.close()


def load(
    agent: str | Path = "",
    *,
    env: str | Answering = "",
    env_price: str = "",
    env_args: str = "",
    max_env_usd: float = 0.0,
    seed: int = -1,
    temperature: float = 0.0,
    device: str = "auto",
) -> Pair:
    """Load an agent and open its environment.

    `agent`: run folder, model folder, hub id or `mini` (default: the newest mini run). `env`: a
    SPEC as for --env, or any object with `ask(messages) -> str` (default: that of the agent's training). The
    other arguments are the flags of infer.py and evaluate.py with these names.

    Raises UsageError or FatalEnvError if the pair cannot play.
    """
    calls = EnvironmentConfig(
        env_args=env_args, env_price=(env_price,) if env_price else (), max_env_usd=max_env_usd
    )
    spec, thread = resolve_agent(str(agent), kv_tokens=0), _LoopThread()
    try:
        pair = open_pair(spec, env, calls, seed=seed, device=device, run=thread.call)
    except BaseException:
        thread.stop()
        raise
    name = str(spec.path)
    return Pair(
        pair.agent, pair.environment, name=name, seed=pair.seed, temperature=temperature, thread=thread
    )
