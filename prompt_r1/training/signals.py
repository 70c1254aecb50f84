"""Signals that stop a run: which they are, and what they cancel."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TypeVar

from prompt_r1.errors import Interrupted, Resumable, SignalBeforeTraining

T = TypeVar("T")

# Slurm announces a time limit by SIGTERM or SIGUSR1, submitit by SIGUSR2. A terminal that closes sends
# SIGHUP.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
# A terminal sends Ctrl-C to all processes of a run, and the parent of the ranks (torchrun, or the process
# that has forked them) sends it to them again. Within this many seconds both count as one.
SAME_CTRL_C = 1.0


def unignored_signals() -> list[int]:
    """The signals of SIGNALS that this process does not ignore.

    A signal that is ignored stays ignored: SIGHUP under nohup, Ctrl-C of a job in a shell's background.
    """
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class Interrupt:
    """Inside `with`, the first signal that comes (one of SIGNALS) stops the run in an orderly way.

    Before training begins, the signal ends the run at once. Afterwards it cancels the games that are running,
    but an update is finished. The ranks agree on the step that they save, and exit. A second Ctrl-C ends the
    run at once, without saving.
    """

    def __init__(self) -> None:
        self.stop: Resumable | None = None  # The error that ends the run; None: no signal has been received.
        self.last_ctrl_c: float | None = None  # monotonic seconds
        self.training_began = False  # Set by train.py. From then on there is something to save.
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._receive) for number in unignored_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        if self.last_ctrl_c is not None:
            # The copy of this Ctrl-C (see SAME_CTRL_C) may come only now, and must not interrupt the end of
            # the run. So its handler stays.
            self._before.pop(signal.SIGINT)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def guard(self, work: Coroutine[None, None, T]) -> T:
        """Await the work. A signal cancels it, and then Resumable is raised."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        # The signal may come while the loop sleeps; only the thread-safe call wakes it up.
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self.stop:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self.stop:
                raise self.stop from None
            raise
        finally:
            self._cancel = lambda: None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_ctrl_c = number == signal.SIGINT
        if is_ctrl_c:
            now, before = time.monotonic(), self.last_ctrl_c
            if before is not None and now - before <= SAME_CTRL_C:
                return
            self.last_ctrl_c = now
            if before is not None:
                raise KeyboardInterrupt
        reason = f"{signal.Signals(number).name} was received"
        if not self.training_began:
            exit_code = 130 if is_ctrl_c else 75
            raise SignalBeforeTraining(f"{reason} before training began", exit_code=exit_code)
        if not self.stop:
            self.stop = Interrupted(reason) if is_ctrl_c else Resumable(reason)
        self._cancel()
