"""SIGTERM and SIGUSR1: a machine that is taken away tells the run to save and leave, with exit code 75.

Before training begins the run leaves at once. After that, games under way are abandoned with their pending
calls, and an update is finished; the ranks agree on the step (`Ranks.gather`), save and leave. Ctrl-C leaves
at once and saves nothing.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TypeVar

from prompt_r1.errors import Resumable

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """Whether this process was told to stop: `name` is the signal's, or ""."""

    def __init__(self) -> None:
        self.name = ""
        self.deferred = False  # True: training has begun, there is something to save
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def guard(self, work: Coroutine[None, None, T]) -> T:
        """Do the work until a signal comes; then cancel it and raise Resumable."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        # The handler runs between two bytecodes of the loop's thread: the loop may be asleep.
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self.name:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if not self.name:
                raise
            raise Resumable(self.reason) from None
        finally:
            self._cancel = lambda: None

    @property
    def reason(self) -> str:
        return f"{self.name} was received" if self.name else ""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        if not self.deferred:
            raise Resumable(f"{self.reason} before training began")
        self._cancel()
