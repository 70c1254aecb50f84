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
from types import TracebackType
from typing import Any, TypeVar

from prompt_r1.agent.agent import Agent, check_endpoint, codec_of, open_agent
from prompt_r1.agent.names import resolve_agent
from prompt_r1.api.asking import Answer, Limits, Piece, ask_pair, raise_for_error
from prompt_r1.config.fields import EnvironmentConfig
from prompt_r1.distributed.ranks import pick_device
from prompt_r1.environments.opening import open_for_agent
from prompt_r1.environments.own import Answering, pool_of
from prompt_r1.environments.pool import Pool

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

    def ask(self, question: str, *, limits: Limits | None = None) -> Answer:
        """Play one game. Raises EnvError if the environment failed, and LimitReached."""
        return _wait_for(self._submit(self._ask(question, limits)))

    async def ask_async(self, question: str, *, limits: Limits | None = None) -> Answer:
        """`ask`, to be awaited."""
        return await asyncio.wrap_future(self._submit(self._ask(question, limits)))

    def ask_all(self, questions: Sequence[str], *, limits: Limits | None = None) -> list[Answer]:
        """Play one game of each question, all at once.

        A failure of the environment ends its own game only: look at `Answer.error`.
        """
        return _wait_for(self._submit(self._ask_all(questions, limits)))

    async def ask_all_async(self, questions: Sequence[str], *, limits: Limits | None = None) -> list[Answer]:
        """`ask_all`, to be awaited."""
        return await asyncio.wrap_future(self._submit(self._ask_all(questions, limits)))

    def stream(self, question: str, *, limits: Limits | None = None) -> Iterator[Piece | Answer]:
        """Yield the dialogue in pieces while it is played, and at last the answer. Raises as `ask`."""
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        future = self._submit(self._ask(question, limits, pieces.put))
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            yield future.result()
        finally:
            future.cancel()

    async def stream_async(
        self, question: str, *, limits: Limits | None = None
    ) -> AsyncIterator[Piece | Answer]:
        """`stream`, for `async for`."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(piece: Piece | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        future = self._submit(self._ask(question, limits, put))
        future.add_done_callback(lambda _: put(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Close the connections. The pair cannot be used afterwards."""
        if self._thread.is_alive():
            _wait_for(self._submit(self._close()))
            self._thread.stop()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pair(agent={self.name!r}, environment={self.environment!r})"

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return self._thread.submit(work)

    async def _ask(
        self, question: str, limits: Limits | None, on_piece: Callable[[Piece], object] | None = None
    ) -> Answer:
        return raise_for_error(await self._play(question, limits, on_piece))

    async def _ask_all(self, questions: Sequence[str], limits: Limits | None) -> list[Answer]:
        async with asyncio.TaskGroup() as group:  # the first error cancels the other games
            games = [group.create_task(self._play(question, limits, None)) for question in questions]
        return [game.result() for game in games]

    async def _play(
        self, question: str, limits: Limits | None, on_piece: Callable[[Piece], object] | None
    ) -> Answer:
        return await ask_pair(
            self._agent,
            self._pool,
            question,
            seed=str(self._seed),
            temperature=self._temperature,
            limits=limits,
            on_piece=on_piece,
        )

    async def _close(self) -> None:
        await self._agent.close()
        await self._pool.close()


class _LoopThread(threading.Thread):
    """An event loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        super().__init__(target=self._loop.run_forever, name="prompt-r1", daemon=True)
        self.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()
        self._loop.close()


def _wait_for(future: "Future[T]") -> T:
    """The result of a future; Ctrl-C cancels it."""
    try:
        return future.result()
    finally:
        future.cancel()  # has no effect on one that is done


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

    `agent`: run folder, model folder, hub id, `mini`, or MODEL@URL (default: the newest mini run). `env`: a
    SPEC as for --env, or any object with `ask(messages) -> str` (default: that of the agent's training). The
    other arguments are the flags of infer.py and evaluate.py with these names.

    Raises UsageError or FatalEnvError if the pair cannot play.
    """
    spec = resolve_agent(str(agent), kv_tokens=0)
    seed = spec.config.seed if seed < 0 else seed
    calls = EnvironmentConfig(
        env_args=env_args, env_price=(env_price,) if env_price else (), max_env_usd=max_env_usd
    )
    place = pick_device(device)
    if isinstance(env, str):
        spec = spec.asking(env, calls)
    codec_of(spec)  # a missing agent is reported before the missing key of an environment
    if isinstance(env, str):
        pool = open_for_agent(env, spec.config, calls, seed=seed, device=place)
    else:
        pool = pool_of(env, route=spec.config.route)
    thread = _LoopThread()
    try:
        _wait_for(thread.submit(pool.check()))  # before a large agent is loaded
        _wait_for(thread.submit(check_endpoint(spec)))
        opened = open_agent(spec, place)
    except BaseException:
        _wait_for(thread.submit(pool.close()))
        thread.stop()
        raise
    return Pair(opened, pool, name=str(spec.path), seed=seed, temperature=temperature, thread=thread)
