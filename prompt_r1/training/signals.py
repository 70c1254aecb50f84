"""Signals that stop a run: which they are, what they cancel, and how they reach all ranks."""

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from prompt_r1.errors import Interrupted, Resumable, SignalBeforeTraining

T = TypeVar("T")

# Slurm announces a time limit by SIGTERM or SIGUSR1, submitit by SIGUSR2. A terminal that closes sends
# SIGHUP.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
# A terminal sends Ctrl-C to all processes of a run. Torchrun, or the rank that has forked the others, sends
# it to the ranks again. Within this many seconds both count as one.
SAME_CTRL_C = 1.0


class Interrupt:
    """Inside `with`, the first signal that comes (one of SIGNALS) stops the run in an orderly way.

    Before training begins, the signal ends the run at once. Afterwards it cancels the games that are running,
    but an update is finished. The ranks agree on the step that they save, and exit. A second Ctrl-C ends the
    run at once, without saving.
    """

    def __init__(self) -> None:
        self.stop: Resumable | None = None  # The error that ends the run; None: no signal has been received.
        self.first_ctrl_c = math.inf  # monotonic seconds of the first Ctrl-C
        self.training_began = False  # Set by the run. From then on there is something to save.
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> "Interrupt":
        # A signal that is ignored stays ignored: SIGHUP under nohup, Ctrl-C of a job in a shell's background.
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
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
        now = time.monotonic()
        is_ctrl_c = number == signal.SIGINT
        if is_ctrl_c and now - self.first_ctrl_c > SAME_CTRL_C:
            raise KeyboardInterrupt
        if is_ctrl_c:
            self.first_ctrl_c = min(self.first_ctrl_c, now)
        reason = f"{signal.Signals(number).name} was received"
        if not self.training_began:
            exit_code = 130 if is_ctrl_c else 75
            raise SignalBeforeTraining(f"{reason} before training began", exit_code=exit_code)
        if not self.stop:
            self.stop = Interrupted(reason) if is_ctrl_c else Resumable(reason)
        self._cancel()


@contextmanager
def signals_forwarded(processes: Collection[int]) -> Iterator[None]:
    """Inside `with`, send each of SIGNALS that this process receives to other processes, too.

    `docker stop` and `kill` signal only one process. A signal handler of Python cannot forward the signal,
    because it is not called while rank 0 waits in a collective until the other ranks have played. So a thread
    reads the number of the signal, which Python writes to a pipe at once.
    """
    if not processes:
        yield
        return
    read_end, write_end = os.pipe()

    def forward() -> None:
        while number := os.read(read_end, 1):
            if number[0] in SIGNALS:  # A user's function may set an alarm (SIGALRM) for itself.
                for process in processes:
                    os.kill(process, number[0])

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    # A user's function may start processes of its own. Their signals are not signals to the run.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        os.close(write_end)
        thread.join()
        os.close(read_end)
