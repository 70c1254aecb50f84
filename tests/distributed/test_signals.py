"""SIGTERM and SIGUSR1: running work is cancelled, and the run stops with a reason."""

import asyncio
import os
import signal

import pytest

from prompt_r1.distributed.signals import SIGNALS, Interrupt
from prompt_r1.errors import Resumable


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cancels_pending_calls_of_the_environment(number):
    cancelled = []

    async def ask() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("ask")
            raise
        return "too late"

    async def games() -> list[str]:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        return await asyncio.gather(ask(), ask())

    with Interrupt() as interrupt, pytest.raises(Resumable, match=f"{number.name} was received"):
        interrupt.deferred = True
        asyncio.run(interrupt.guard(games()))
    assert cancelled == ["ask", "ask"]


def test_a_signal_during_an_update_stops_the_next_work():
    async def work() -> None:
        pytest.fail("started after the signal")

    with Interrupt() as interrupt:
        interrupt.deferred = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)  # the second changes nothing
        assert interrupt.reason == "SIGTERM was received"
        with pytest.raises(Resumable):
            asyncio.run(interrupt.guard(work()))


def test_a_signal_before_training_ends_the_run_at_once():
    with Interrupt(), pytest.raises(Resumable, match="before training began"):
        os.kill(os.getpid(), signal.SIGUSR1)


def test_work_without_a_signal_returns_its_result_or_raises_its_error():
    async def fine() -> int:
        return 7

    async def broken() -> int:
        raise KeyError("mine")

    with Interrupt() as interrupt:
        assert asyncio.run(interrupt.guard(fine())) == 7
        with pytest.raises(KeyError):
            asyncio.run(interrupt.guard(broken()))


def test_the_earlier_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before
