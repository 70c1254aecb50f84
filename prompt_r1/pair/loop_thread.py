"""An event loop in a thread, for code that is not asynchronous."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from prompt_r1.errors import UsageError

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread: a program does not wait for this thread at its end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing: Future[None] | None = None  # what `close` does; None: it has not been called
        # Work that started after the loop has stopped would never end.
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="prompt-r1", daemon=True).start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work in the loop. Raises UsageError if the loop has been closed."""
        with self._lock:
            if self._closing is None:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise UsageError("this pair is closed: load it again")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work. Ctrl-C cancels it."""
        future = self.start(work)
        try:
            return result_of(future)
        finally:
            future.cancel()  # has no effect on work that has ended

    def close(self, disconnect: Callable[[], Awaitable[None]] | None = None) -> Future[None]:
        """Cancel the work that runs, then call `disconnect`, and end the thread. A second call does nothing.

        Returns a future that is done when the connections are closed.
        """
        with self._lock:
            if self._closing is None:
                self._closing = asyncio.run_coroutine_threadsafe(self._cancel_all(disconnect), self._loop)
                self._closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
            return self._closing

    async def _cancel_all(self, disconnect: Callable[[], Awaitable[None]] | None) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # No call runs any more, so the connections can be closed.
        if disconnect is not None:
            await disconnect()


def result_of(future: Future[T]) -> T:
    """The result of work in the loop. Raises what the work raises, and UsageError if the loop was closed."""
    try:
        return future.result()
    except CancelledError:
        raise UsageError("the pair was closed while it played this question") from None
