"""Signals: what runs is abandoned, and said so."""

import asyncio
import os
import signal

import pytest

from prompt_r1.distributed.signals import SIGNALS, Interrupt
from prompt_r1.errors import Resumable


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cancels_what_waits_for_the_environment(number):
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


def test_a_signal_during_an_update_is_heeded_by_the_next_work():
    async def work() -> None:
        pytest.fail("begun after the signal")

    with Interrupt() as interrupt:
        interrupt.deferred = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)  # the second changes nothing
        assert interrupt.reason == "SIGTERM was received"
        with pytest.raises(Resumable):
            asyncio.run(interrupt.guard(work()))


def test_before_training_a_signal_ends_the_run_at_once():
    with Interrupt(), pytest.raises(Resumable, match="before training began"):
        os.kill(os.getpid(), signal.SIGUSR1)


def test_work_that_is_not_interrupted_gives_its_result_and_its_errors():
    async def fine() -> int:
        return 7

    async def broken() -> int:
        raise KeyError("mine")

    with Interrupt() as interrupt:
        assert asyncio.run(interrupt.guard(fine())) == 7
        with pytest.raises(KeyError):
            asyncio.run(interrupt.guard(broken()))


def test_the_handlers_before_come_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before
