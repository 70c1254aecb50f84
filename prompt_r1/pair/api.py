"""A trained agent and its environment, from Python: `prompt_r1.load(…).ask("…")`.

All games of a pair run in one event loop, in a thread of its own: a notebook already runs a loop, which
cannot be entered again, and questions from several threads must share the engine's batch. This is the only
such thread of the package.
"""

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prompt_r1.environments.sources import Answering
from prompt_r1.pair.dialogue import Piece
from prompt_r1.pair.playing import NO_LIMITS, Limits, OpenPair, answered, open_pair
from prompt_r1.pair.settings import PairConfig
from prompt_r1.types import Trajectory

T = TypeVar("T")


class Pair(AbstractContextManager["Pair"]):
    """An agent that is loaded, and the environment that it questions; a context manager.

    Its methods may be called from several threads at once, and while an event loop runs.
    """

    def __init__(self, pair: OpenPair, loop: asyncio.AbstractEventLoop) -> None:
        self.environment = pair.environment.name
        self._pair = pair
        self._loop = loop

    def ask(self, question: str, *, limits: Limits = NO_LIMITS) -> Trajectory:
        """Play one game: its `answer` (None: it ended without one), `turns`, `spent` and `seconds`.

        Raises EnvError if the environment failed, and LimitReached.
        """
        return answered(_call(self._loop, self._pair.play(question, limits=limits)))

    def stream(self, question: str, *, limits: Limits = NO_LIMITS) -> Iterator[Piece | Trajectory]:
        """Yield the dialogue in pieces while it is played, and at last the game. Raises as `ask`.

        Closing the iterator cancels the game.
        """
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        work = self._pair.play(question, limits=limits, on_piece=pieces.put)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            yield answered(future.result())
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread, and cancel its games. The pair cannot be used afterwards."""
        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._loop.stop)

    def __exit__(self, *error: object) -> None:
        self.close()


def _start_loop() -> asyncio.AbstractEventLoop:
    """An event loop that runs in a daemon thread, which a program does not wait for at its end."""
    loop = asyncio.new_event_loop()

    async def end() -> None:
        games = asyncio.all_tasks() - {asyncio.current_task()}
        for game in games:
            game.cancel()
        await asyncio.gather(*games, return_exceptions=True)
        await loop.shutdown_asyncgens()  # closes the environment's connections

    def run() -> None:
        loop.run_forever()
        loop.run_until_complete(end())
        loop.close()

    threading.Thread(target=run, name="prompt-r1", daemon=True).start()
    return loop


def _call(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """The result of work in the loop of another thread; Ctrl-C cancels it."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
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

    `agent`: run folder, model folder, hub id or `mini` (default: the newest mini run). `env`: a
    SPEC as for --env, or any object with `ask(messages) -> str` (default: that of the agent's training). The
    other arguments are the flags of infer.py and evaluate.py with these names.

    Raises UsageError or FatalEnvError if the pair cannot play.
    """
    own, spec = (None, env) if isinstance(env, str) else (env, "")
    config = PairConfig(
        agent=str(agent),
        env=spec,
        env_price=env_price,
        env_args=env_args,
        max_env_usd=max_env_usd,
        seed=seed,
        temperature=temperature,
        device=device,
    )
    loop = _start_loop()
    try:
        return Pair(open_pair(config, partial(_call, loop), own), loop)
    except BaseException:
        loop.call_soon_threadsafe(loop.stop)
        raise
