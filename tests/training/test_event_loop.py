"""`SlicedLoop`: it runs until nothing is ready, and its clock stands still between two slices."""

import asyncio
import socket
import time

import pytest

from prompt_r1.training.event_loop import SlicedLoop, until_idle


@pytest.fixture
def runner():
    with asyncio.Runner(loop_factory=SlicedLoop) as runner:
        yield runner


def start(runner: asyncio.Runner, work) -> asyncio.Task:
    async def create() -> asyncio.Task:
        return asyncio.create_task(work)

    return runner.run(create())


def test_a_slice_ends_when_all_tasks_wait(runner):
    seen: list[int] = []

    async def work() -> None:
        for number in range(100):
            await asyncio.sleep(0)
            seen.append(number)
        await asyncio.Event().wait()

    start(runner, work())
    begin = time.perf_counter()
    runner.run(until_idle())
    assert seen == [*range(100)] and time.perf_counter() - begin < 1
    runner.run(until_idle())  # nothing is ready


def test_data_that_came_between_two_slices_is_read_in_the_next_one(runner):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    seen: list[bytes] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        seen.append(await loop.sock_recv(ours, 9))
        await loop.sock_sendall(ours, b"thanks")

    with ours, theirs:
        task = start(runner, work())
        runner.run(until_idle())
        assert not seen
        theirs.sendall(b"reply")
        runner.run(until_idle())
        assert seen == [b"reply"] and task.done() and theirs.recv(9) == b"thanks"


def test_a_timeout_does_not_count_the_time_between_two_slices(runner):
    """On asyncio's own loop the timer would expire first, and the reply that had come would be lost."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def work() -> bytes:
        async with asyncio.timeout(0.5):
            return await asyncio.get_running_loop().sock_recv(ours, 9)

    with ours, theirs:
        task = start(runner, work())
        runner.run(until_idle())
        theirs.sendall(b"reply")
        time.sleep(0.7)
        runner.run(until_idle())
        assert task.result() == b"reply"


def test_a_loop_that_runs_keeps_the_time(runner):
    begin = time.perf_counter()
    runner.run(asyncio.sleep(0.05))
    assert time.perf_counter() - begin >= 0.05
    task = start(runner, asyncio.wait_for(asyncio.Event().wait(), 0.05))
    with pytest.raises(TimeoutError):
        runner.run(asyncio.wait_for(task, 60))
