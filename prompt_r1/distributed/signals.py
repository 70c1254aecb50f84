"""SIGTERM and SIGUSR1: save and exit with code 75.

Before training begins the run exits at once. Afterwards, running games are cancelled with their pending
calls, but an update is finished; the ranks agree on the step (`Ranks.gather`), save and exit. Ctrl-C exits at
once without saving.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TypeVar

from prompt_r1.errors import Resumable

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """Handles the signals inside `with`; `name` is that of the first one received, or "".

    Python delivers signals to the main thread only: in another one, as under a notebook, nothing is handled.
    """

    def __init__(self) -> None:
        self.name = ""
        self.received = 0.0  # monotonic seconds, when it was
        self.deferred = False  # set once training has begun and there is something to save
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> "Interrupt":
        handled = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def guard(self, work: Coroutine[None, None, T]) -> T:
        """Await the work; a signal cancels it, and Resumable is raised."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        # Thread-safe, to wake up the loop: the signal may come while it sleeps.
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
        """Why the run stops, or ""."""
        return f"{self.name} was received" if self.name else ""

    @property
    def age(self) -> str:
        """How long ago the signal came, in brackets; "" if none has come."""
        return f" ({time.monotonic() - self.received:.0f} s after the signal)" if self.name else ""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.name, self.received = signal.Signals(number).name, time.monotonic()
        if not self.deferred:
            raise Resumable(f"{self.reason} before training began")
        self._cancel()
