"""Requests that take much longer than others are sent again, against a server with a clock of its own."""

import asyncio
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from inspect import signature

import httpx
import pytest

from prompt_r1.environments.budget import Price
from prompt_r1.environments.endpoint import Endpoint
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.own import OwnSource
from prompt_r1.environments.sources import CALL_DEADLINE
from prompt_r1.errors import EnvError
from prompt_r1.model.distributed import start_ranks
from prompt_r1.types import GameSettings
from tests.support.at_once import at_once
from tests.support.clock import run_jumping
from tests.support.counting import CountingSource
from tests.support.paths import ROOT
from tests.support.providers import (
    HELLO,
    OK,
    attempt,
    environment_of,
    environment_over,
    open_environment,
    reply,
)


@dataclass
class SlowServer:
    """Replies after the next of these seconds; then, and at first, after `usual` seconds."""

    usual: float = 2.0
    next_seconds: list[float] = field(default_factory=list)
    requests: int = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        await asyncio.sleep(self.next_seconds.pop(0) if self.next_seconds else self.usual)
        return httpx.Response(200, content=OK.content)


def seconds_of_a_call(
    server: SlowServer, slow: list[float], *, replies: int = 60, **settings: object
) -> float:
    """How long a call takes after some replies, if its requests take so long. All requests are charged."""
    asked = environment_over(server, **settings)

    async def play() -> float:
        for _ in range(replies):
            await reply(asked)
        server.next_seconds = list(slow)
        begin = asyncio.get_running_loop().time()
        await reply(asked)
        return asyncio.get_running_loop().time() - begin

    seconds = run_jumping(play())
    metrics = asked.take_metrics()
    assert asked.budget.charged.calls == server.requests, "each request is charged"
    assert metrics["env/paid"] + metrics["env/lost"] == server.requests, "and each repeat is counted as lost"
    return seconds


def test_a_slow_request_is_sent_again_after_four_times_the_median():
    server = SlowServer(usual=5.0)
    # 20 seconds, at most half a second of back-off, and the second request
    assert 25 <= seconds_of_a_call(server, [100.0]) <= 26
    assert server.requests == 60 + 2


@dataclass
class OftenBusy(SlowServer):
    """Says to two of three requests at once that it is busy, until it has replied 60 times."""

    arrived: int = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.arrived += 1
        if self.arrived % 3 > 0 and self.requests < 60:
            return httpx.Response(429)
        return await super().__call__(request)


def test_only_replies_count_in_the_median():
    """Otherwise the quick 429s of a busy server would lower the median, and slow replies be given up."""
    assert seconds_of_a_call(OftenBusy(usual=5.0), [15.0]) == pytest.approx(15)


def test_a_request_has_at_least_ten_seconds():
    assert seconds_of_a_call(SlowServer(), [9.9]) == pytest.approx(9.9)
    assert 12 <= seconds_of_a_call(SlowServer(), [100.0]) <= 13


def test_the_limit_doubles_with_each_repeat():
    """A server that became ten times slower under our own requests gets three of a call, not five."""
    server = SlowServer(usual=5.0)
    assert 20 + 40 + 50 <= seconds_of_a_call(server, [50.0, 50.0, 50.0]) <= 112
    assert server.requests == 60 + 3


@pytest.mark.parametrize(
    "settings", [{"replies": 49}, {"base_url": "http://localhost:8000/v1"}], ids=["few replies", "loopback"]
)
def test_without_a_median_or_on_this_machine_a_request_has_its_whole_time(settings):
    server = SlowServer()
    assert seconds_of_a_call(server, [119.0], **settings) == pytest.approx(119)


def test_no_request_has_more_than_the_whole_time():
    """Four times the median would be 200 seconds."""
    # 120 seconds, at most half a second of back-off, and the second request
    assert 170 <= seconds_of_a_call(SlowServer(usual=50.0), [190.0]) <= 171


class TimingOut(CountingSource):
    """A source whose attempts have no limit, and end with an error of its own."""

    resends_slow = True

    def __init__(self) -> None:
        super().__init__(TimeoutError("its own"))


def test_a_source_without_a_limit_may_raise_a_timeout_error_of_its_own():
    """A bug: the message about a limit of None raised a TypeError."""
    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(attempt(TimingOut()))


class HangingObject:
    """An environment of the user that never replies."""

    async def ask(self, messages: list[object]) -> str:
        await asyncio.Event().wait()
        return ""


def test_a_hanging_object_of_the_user_fails_its_call_before_the_other_ranks_give_up():
    """Bugs: a single rank waited for it forever, and then half an hour for each of four calls of a game."""

    async def seconds() -> float:
        with pytest.raises(EnvError, match=r"HangingObject .*600 s"):
            await reply(environment_of(HangingObject()))
        return asyncio.get_running_loop().time()

    assert run_jumping(seconds()) == pytest.approx(CALL_DEADLINE)
    calls_of_a_game = GameSettings().max_turns - 1
    hour_of_the_ranks = signature(start_ranks).parameters["timeout"].default
    assert calls_of_a_game * (CALL_DEADLINE + Endpoint.timeout) < hour_of_the_ranks


def test_a_priced_object_of_the_user_that_hangs_is_charged_at_its_estimate():
    """A bug: its call was free, though its thread goes on, so that no limit of dollars held."""
    source = OwnSource(HangingObject(), seed=0, priced=True, reply_limit=100)
    asked = Environment([source], prices=[Price(1.0, 1.0)])

    async def play() -> None:
        with pytest.raises(EnvError):
            await reply(asked)

    run_jumping(play())
    [client] = asked.clients
    assert asked.budget.charged.usd == asked.budget.charged.lost_usd == client.estimate(HELLO).usd > 0


@pytest.mark.parametrize(("replies", "seconds"), [(49, 100), (50, 25)])
def test_the_median_counts_from_the_fiftieth_reply_on(replies, seconds):
    """One reply fewer, and a slow request has its whole time."""
    taken = seconds_of_a_call(SlowServer(usual=5.0), [100.0], replies=replies)
    assert seconds <= taken <= seconds + 1


ABANDON_A_CALL = """
import asyncio
import threading

from prompt_r1.environments.own import OwnSource
from prompt_r1.environments.sources import Caller

begun = threading.Event()


class Hanging:
    def ask(self, messages):
        begun.set()
        threading.Event().wait()


async def cancel():
    call = asyncio.create_task(OwnSource(Hanging(), seed=0).attempt([], Caller()))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call])


asyncio.run(cancel())
"""


def test_a_program_ends_although_a_call_of_the_users_object_still_hangs():
    """A bug: the program had done its work, and waited for the thread of the call forever."""
    subprocess.run([sys.executable, "-c", ABANDON_A_CALL], cwd=ROOT, check=True, timeout=60)


class FortyAtOnce:
    """Each call waits until forty calls are running."""

    forty, lock = threading.Barrier(40), threading.Lock()
    running = most = 0

    def ask(self, messages: list[object]) -> str:
        with self.lock:
            type(self).running += 1
            type(self).most = max(self.most, self.running)
        self.forty.wait(timeout=10)
        with self.lock:
            type(self).running -= 1
        return "met"


def test_as_many_calls_of_the_users_object_run_at_once_as_env_concurrency_says():
    """A bug: asyncio's pool has few threads, and the wait for one counted as time of the call."""
    spec = "py:tests.environments.test_slow_requests:FortyAtOnce"
    asked = open_environment(spec, env_concurrency=40)

    async def play() -> list[str]:
        replies = await asyncio.gather(*(reply(asked, sample=sample) for sample in range(80)))
        await asked.close()
        return replies

    assert asyncio.run(play()) == ["met"] * 80
    assert FortyAtOnce.most == 40


def test_a_decorated_async_ask_is_awaited():
    """It does not look like an async function, so it is called in a thread, which returns a coroutine."""

    class Decorated:
        def ask(self, messages):
            return self.later(messages)

        async def later(self, messages):
            return "met"

    assert at_once([reply(environment_of(Decorated()))]) == ["met"]


def test_objects_of_the_user_reply_in_threads_so_that_their_calls_overlap():
    """Each of two calls waits until the other has begun, which blocks the event loop outside of a thread."""
    both = threading.Barrier(2)

    class Meeting:
        def ask(self, messages):
            both.wait(timeout=5)
            return "met"

    asked = environment_of(Meeting())
    assert at_once(reply(asked, sample=sample) for sample in range(2)) == ["met"] * 2
