"""An event loop that runs in slices, each until nothing is ready, between the computations of its thread."""

import asyncio
import selectors


class _IdleSelector(selectors.DefaultSelector):
    """Wakes up `idle` in place of waiting."""

    idle: "asyncio.Future[None] | None" = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.idle is not None:
            if not self.idle.done():
                self.idle.set_result(None)
            self.idle = None
            return events
        return super().select(timeout)


class SlicedLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while it does not run.

    A timeout therefore counts the time in which a response could be read. Otherwise a response that came
    during a long computation would meet a timer that has expired.
    """

    def __init__(self) -> None:
        self._idle_selector = _IdleSelector()
        self._stopped_seconds = 0.0
        self._stopped_at: float | None = None
        super().__init__(self._idle_selector)

    def time(self) -> float:
        """Seconds, without those in which the loop did not run."""
        now = super().time() if self._stopped_at is None else self._stopped_at
        return now - self._stopped_seconds

    def run_forever(self) -> None:
        """Run until the loop is stopped. The clock goes on where it stood still."""
        if self._stopped_at is not None:
            self._stopped_seconds += super().time() - self._stopped_at
            self._stopped_at = None
        try:
            super().run_forever()
        finally:
            self._stopped_at = super().time()

    async def until_idle(self) -> None:
        """Let the other tasks run until all of them wait for time to pass or for data to arrive."""
        self._idle_selector.idle = self.create_future()
        await self._idle_selector.idle


async def until_idle() -> None:
    """`SlicedLoop.until_idle` of the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SlicedLoop), "the loop of a run with --ahead 1"
    await loop.until_idle()
