"""SIGTERM, SIGUSR1 and the first Ctrl-C: save and exit.

Before training begins the run exits at once. Afterwards, running games are cancelled with their pending
calls, but an update is finished; the ranks agree on the step (`Ranks.gather`), save and exit. A second Ctrl-C
exits at once without saving.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TypeVar

from prompt_r1.errors import Interrupted, Resumable

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_CTRL_C = 1.0  # seconds: a terminal sends it to torchrun and to its ranks, and torchrun sends it again


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
        # A shell ignores Ctrl-C for what it runs in the background, where it must not end the run.
        deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        heard = [number for number in handled if number != signal.SIGINT or not deaf]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
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
            raise self.stops(self.reason) from None
        finally:
            self._cancel = lambda: None

    @property
    def reason(self) -> str:
        """Why the run stops, or ""."""
        return f"{self.name} was received" if self.name else ""

    @property
    def stops(self) -> type[Resumable]:
        """The exception that ends the run, and with it the exit code."""
        return Interrupted if self.name == "SIGINT" else Resumable

    @property
    def age(self) -> str:
        """How long ago the signal came, in brackets; "" if none has come."""
        return f" ({time.monotonic() - self.received:.0f} s after the signal)" if self.name else ""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.name and time.monotonic() - self.received > SAME_CTRL_C:
            raise KeyboardInterrupt
        if not self.name:
            self.name, self.received = signal.Signals(number).name, time.monotonic()
        if not self.deferred:
            raise self.stops(f"{self.reason} before training began")
        self._cancel()
