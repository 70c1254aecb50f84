"""The HTTP client against scripted responses: retries, limits, requests, the check, the key."""

import asyncio
import json
import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from prompt_r1.environments.budget import Budget
from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import MAX_EMPTY_RESPONSES, Environment, back_off
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import NoText
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.spending import Spending
from tests.support.clock import run_jumping, seconds_of
from tests.support.json_server import JsonHandler, serving
from tests.support.providers import (
    HELLO,
    KEY,
    OK,
    Provider,
    ask,
    attempt,
    body_of,
    endpoint,
    environment_over,
    error_of,
    reply,
)


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the endpoints is where a user has it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask_at_once(asked: Environment, count: int) -> list[str]:
    """The texts of concurrent calls."""

    async def calls() -> list[str]:
        return await asyncio.gather(*(reply(asked) for _ in range(count)))

    return run_jumping(calls())


class Timed(Provider):
    """A provider that answers after a second, and records when each request comes."""

    def __init__(self, *script: httpx.Response | Exception) -> None:
        super().__init__(*script)
        self.times: list[float] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        return await super().__call__(request)


@pytest.mark.parametrize("failures", [0, 2, 10])
@pytest.mark.parametrize("failure", [httpx.Response(500), httpx.ReadError("reset")], ids=["500", "exception"])
def test_a_failed_request_is_retried_until_it_succeeds(
    failures: int, failure: httpx.Response | Exception
) -> None:
    provider = Provider(*[failure] * failures, OK)
    assert ask(environment_over(provider)) == "Paris"
    assert provider.requests == [{"model": "large", "messages": HELLO}] * (failures + 1)


def test_time_ends_a_call_and_not_the_number_of_its_requests() -> None:
    """A bug: retries ended after 8 s though a model takes longer to load, and 429s last a minute."""
    provider = Provider(httpx.Response(503, json=error_of("Loading\nmodel")))

    async def call() -> None:
        with pytest.raises(EnvError, match=r"large .*600 s.*: HTTP 503: Loading model$"):
            await reply(environment_over(provider))

    assert 560 < seconds_of(call()) <= 600 and len(provider.requests) > 30


def test_pauses_after_other_calls_do_not_keep_a_call_beyond_its_deadline() -> None:
    """A bug: the deadline was compared with the call's own wait, not with pauses that others extended."""
    busy = httpx.Response(503, headers={"Retry-After": "120"})
    environment = environment_over(Provider(busy))

    async def other_calls() -> None:
        while True:  # The server asks for another pause in its response to another call.
            environment.clients[0].paused_until = asyncio.get_running_loop().time() + 120
            await asyncio.sleep(100)

    async def call() -> None:
        others = asyncio.create_task(other_calls())
        with pytest.raises(EnvError, match=r"600 s.*: HTTP 503"):
            await reply(environment)
        others.cancel()

    assert seconds_of(call()) <= 600


def test_a_loading_server_is_waited_for_with_one_line(caplog) -> None:
    loading = httpx.Response(503, json=error_of(f"Loading\nmodel for {KEY}"))
    asked = environment_over(Provider(*[loading] * 40, OK))
    assert ask_at_once(asked, 4) == ["Paris"] * 4
    assert ask(environment_over(Provider(httpx.Response(429), OK))) == "Paris"  # a short wait is no news
    assert [record.message for record in caplog.records] == [
        "waiting for large at https://llm.test/v1: HTTP 503: Loading model for [key]"
    ]


def test_each_outage_has_its_line(caplog) -> None:
    """A bug: the second one of a run was waited for without a word."""
    loading = httpx.Response(503, headers={"retry-after": "20"})
    asked = environment_over(Provider(loading, loading, OK, loading, OK))
    assert [ask(asked), ask(asked)] == ["Paris"] * 2
    assert len(caplog.records) == 2


def test_responses_without_a_reply_are_charged_and_few_are_paid_for() -> None:
    provider = Provider(OK, httpx.Response(200, json={}))
    asked = environment_over(provider)
    ask(asked)
    with pytest.raises(EnvError, match=r"often ends in /v1\) in: \{\}"):
        ask(asked)
    assert len(provider.requests) == 1 + MAX_EMPTY_RESPONSES == asked.budget.charged.calls
    assert asked.take_metrics()["env/lost"] == MAX_EMPTY_RESPONSES


@pytest.mark.parametrize(("size", "is_read"), [(2_000_000, True), (2_000_001, False)])
def test_a_response_may_have_two_million_bytes_and_no_more(size: int, is_read: bool) -> None:
    padded = OK.content.ljust(size)
    came = attempt(endpoint(Provider(httpx.Response(200, content=padded))))
    if is_read:
        assert asyncio.run(came).text == "Paris"
    else:
        with pytest.raises(NoText, match="over 2,000,000 bytes"):
            asyncio.run(came)


def test_back_off_has_full_jitter_under_a_doubling_limit() -> None:
    for failures, limit in enumerate((0.5, 1, 2, 4, 8, 16, 30, 30), start=1):
        waits = [back_off(failures) for _ in range(500)]
        assert 0 <= min(waits) < 0.05 * limit and 0.95 * limit < max(waits) <= limit


def test_a_requested_wait_delays_all_calls() -> None:
    """A call that has not been sent yet waits as well, and a later, shorter wait shortens none."""
    busy = [httpx.Response(503, headers={"Retry-After": seconds}) for seconds in ("20", "1")]
    provider = Timed(*busy, OK)
    environment = environment_over(provider)

    async def later_call() -> None:
        await asyncio.sleep(5)
        await reply(environment)

    async def three_calls() -> None:
        await asyncio.gather(reply(environment), reply(environment), later_call())

    run_jumping(three_calls())
    assert provider.times == pytest.approx([0, 0, 21, 21, 21])


def test_a_requested_wait_also_delays_a_call_that_is_waiting_already() -> None:
    """A bug: a call that waited for its own back-off was sent in the middle of the requested 20 seconds."""
    busy = httpx.Response(503, headers={"Retry-After": "20"})
    provider = Timed(httpx.Response(503), busy, OK)
    ask_at_once(environment_over(provider), 2)
    assert provider.times == pytest.approx([0, 0, 21, 21])


def test_waiting_for_a_slot_does_not_count_against_the_deadline() -> None:
    """A call starts its ten minutes when it gets a slot: six calls through one take longer than that."""
    busy = httpx.Response(503, headers={"Retry-After": "110"})
    provider = Provider(*[step for _ in range(12) for step in (busy, OK)])
    assert ask_at_once(environment_over(provider, concurrency=1), 12) == ["Paris"] * 12


def test_half_a_character_in_the_system_message_is_sent() -> None:
    """A terminal gives bytes that are no UTF-8 as half characters. The first call ended the run."""
    ask(environment_over(provider := Provider(OK), system="a\udcff"))
    assert provider.requests[0]["messages"][0] == {"role": "system", "content": "a\udcff"}


def test_a_dialogue_keeps_its_own_system_message() -> None:
    own = [{"role": "system", "content": "Be long."}, *HELLO]
    ask(environment_over(provider := Provider(OK), system="Be brief."), own)
    assert [request["messages"] for request in provider.requests] == [own]


def check(*script: httpx.Response | Exception, **settings: object) -> list[dict[str, object]]:
    """Check an endpoint that answers with these responses, and return the bodies of the requests."""
    provider = Provider(*script)
    asyncio.run(check_servers(environment_over(provider, **settings)))
    return provider.requests


def noted(method: Callable[..., object], objects: list[object]) -> Callable[..., object]:
    """The method, which also appends its object to a list."""

    def noting(self: object, *arguments: object, **keywords: object) -> object:
        objects.append(self)
        return method(self, *arguments, **keywords)

    return noting


@pytest.mark.parametrize("answer", [OK, httpx.Response(401)])
def test_the_check_leaves_no_connection_to_the_event_loop_of_the_games(answer, monkeypatch) -> None:
    """A connection of a loop that is closed breaks the first call of the next loop."""
    opened, closed = [], []
    monkeypatch.setattr(httpx.AsyncClient, "__init__", noted(httpx.AsyncClient.__init__, opened))
    monkeypatch.setattr(httpx.AsyncClient, "aclose", noted(httpx.AsyncClient.aclose, closed))
    with suppress(FatalEnvError):
        check(answer)
    assert opened == closed and len(opened) == 1


@pytest.mark.parametrize("answer", [OK, httpx.Response(503), httpx.ReadError("reset"), httpx.Response(429)])
def test_the_check_asks_once_as_a_game_does_and_a_busy_endpoint_passes(answer) -> None:
    [sent] = check(answer, system="Be brief.", fields={"top_p": 0.5})
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert sent["top_p"] == 0.5


NO_TLS = httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number")  # https for http
PAGE = httpx.Response(200, text="<!doctype html><title>Log in</title>")
LM_STUDIO = {"error": "Unexpected endpoint or method. (POST /chat/completions)"}
CLOUDFLARE = {"success": False, "errors": [{"code": 5007, "message": "No such model"}]}
ODD = error_of("Developer instruction is not enabled")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.ProxyError("407 Proxy Authentication Required"), r"no server answers \(407 Proxy"),
        (NO_TLS, r"no server answers .*WRONG_VERSION.*: check the URL"),
        (httpx.ConnectError("refused"), r"large at https://llm.test/v1 cannot be used: no server answers"),
        (PAGE, r"often ends in /v1\) in: <!doctype html><title>Log in</title>"),
        (httpx.Response(200, json=LM_STUDIO), r"in: Unexpected endpoint"),
        (httpx.Response(200, json=CLOUDFLARE), "No such model"),
        (httpx.Response(401, json=error_of("expired")), r"HTTP 401: expired \(check OPENAI_API_KEY"),
        (httpx.Response(404, json=error_of("no such model")), "HTTP 404: no such model"),
        (httpx.Response(400, json=ODD), r'not enabled \(if .* no system message, give --env-system ""\)'),
        (httpx.Response(429, json=error_of("x", code="insufficient_quota")), "check plan and billing"),
    ],
)
def test_an_endpoint_that_cannot_be_used_fails_the_check_with_the_servers_words(answer, words) -> None:
    """A bug: LM Studio, at a URL without /v1, passed the check, and each call took ten minutes."""
    with pytest.raises(FatalEnvError, match=words):
        check(answer, system="Be brief.")


def test_the_check_says_why_an_endpoint_that_passes_is_busy(caplog) -> None:
    """A server that takes no system message may answer with a 500: its words tell."""
    assert len(check(httpx.Response(500, json=ODD))) == 1
    assert "large at https://llm.test/v1 is busy: HTTP 500: Developer instruction" in caplog.text


def test_a_reply_without_text_fails_the_check() -> None:
    """A bug: with max_tokens above the server's window every reply was empty, and the check passed."""
    with pytest.raises(UsageError, match=r"without any text \(length\).*max_tokens"):
        check(httpx.Response(200, json=body_of("", finish="length")), fields={"max_tokens": 9999})


def test_each_start_checks_and_pays_for_it(tmp_path: Path) -> None:
    """A bug: a key that had expired passed the check of a resumed run, because its reply was recorded."""
    asyncio.run(check_servers(environment_over(Provider(OK), folder=tmp_path)))
    assert Journal(tmp_path).charged.calls == 1
    with pytest.raises(FatalEnvError, match="HTTP 401"):
        asyncio.run(check_servers(environment_over(Provider(httpx.Response(401)), folder=tmp_path)))


@pytest.mark.parametrize(
    "failure",
    [
        httpx.Response(401, json=error_of(f"bad key {KEY}")),
        httpx.Response(401, json=error_of("x" * 280 + KEY)),  # the reason is cut within the key
        httpx.Response(500, json=error_of(f"header Bearer {KEY.upper()}")),
        httpx.Response(400, json={"detail": [{"headers": {"authorization": KEY.lower()}}]}),
        httpx.ConnectError(f"Illegal header value b'Bearer {KEY}'"),
    ],
)
def test_no_exception_contains_the_key(failure: httpx.Response | Exception) -> None:
    with pytest.raises((EnvError, Resumable)) as caught:
        ask(environment_over(Provider(failure)))
    assert "secret" not in "".join(traceback.format_exception(caught.value)).lower()


class EchoingHandler(JsonHandler):
    """Sends the key back beside the status, and in a header."""

    def do_POST(self) -> None:
        self.body()
        key = self.headers["Authorization"]
        content = json.dumps(body_of()).encode()
        self.send_response(200, key)
        self.send_header("X-Echo", key)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def test_no_log_line_contains_the_key(caplog) -> None:
    """A bug: httpx logs the reason phrase beside the status, in which a server can send the key back."""
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, logger=name)
    with serving(EchoingHandler) as url:
        assert asyncio.run(reply(Environment([endpoint(base_url=url)]))) == "Paris"
    assert "secret" not in caplog.text.lower()


def test_no_text_of_a_reply_contains_the_key(tmp_path: Path) -> None:
    """A bug: a server that echoed the key as `finish_reason` had it written to the journal."""
    sent = f"You sent {KEY}."
    message = {"content": sent, "reasoning_content": sent}
    choice = {"message": message, "finish_reason": f"stop {KEY}"}
    response = httpx.Response(200, json={"choices": [choice]})
    asked = environment_over(Provider(response), folder=tmp_path)
    assert ask(asked) == "You sent [key]."
    line = (tmp_path / "rank0.jsonl").read_text()
    assert '"finish": "stop [key]"' in line and KEY.lower() not in line.lower()


def test_a_short_placeholder_key_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local servers need any key at all: replies may contain the word "EMPTY"."""
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    body = body_of("The set is EMPTY.", reasoning_content="EMPTY?")
    said = asyncio.run(attempt(endpoint(Provider(httpx.Response(200, json=body)), key="EMPTY")))
    assert (said.text, said.reasoning) == ("The set is EMPTY.", "EMPTY?")


def test_a_budget_without_room_stops_a_call_but_not_the_check(tmp_path: Path) -> None:
    """A resumed run whose calls are all recorded needs no other ones."""
    provider = Provider(OK)
    asked = Environment([endpoint(provider)], budget=Budget(max_calls=1, charged=Spending(calls=1)))
    asyncio.run(check_servers(asked))
    with pytest.raises(Resumable, match="larger limit resumes"):
        ask(asked)
    assert not provider.requests
