"""An event loop whose clock jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingLoop(asyncio.SelectorEventLoop):
    """Waits for no timer: its time moves on by as long as it would have waited."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(JumpingSelector(self))

    def time(self) -> float:
        return self.now


class JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()
        self._loop.now += timeout
        return super().select(0)


def run_jumping(work: Coroutine[Any, Any, T]) -> T:
    """Run in such a loop."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


def seconds_of(work: Coroutine[Any, Any, object]) -> float:
    """How long the work takes by the clock of such a loop, which begins at 0."""

    async def timed() -> float:
        await work
        return asyncio.get_running_loop().time()

    return run_jumping(timed())
