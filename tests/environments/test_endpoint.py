"""The HTTP client against scripted responses: retries, limits, requests, the key."""

import asyncio
from pathlib import Path

import httpx
import pytest

from prompt_r1.environments.endpoint import MOST_ANSWERS, Endpoint
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.errors import EnvError, FatalEnvError, UsageError
from tests.support.at_once import at_once
from tests.support.providers import (
    HELLO,
    KEY,
    OK,
    MovingClock,
    Provider,
    RecordedAccount,
    RecordedSleep,
    ask,
    body_of,
    endpoint,
    error_of,
    outcome_of,
    reply,
)


def ask_at_once(environment: Endpoint, count: int) -> list[str]:
    """The texts of concurrent calls."""
    calls = (reply(environment) for _ in range(count))
    return at_once(calls, seconds=None)  # MovingClock moves the time of the loop


@pytest.mark.parametrize("failures", [0, 2, 10])
@pytest.mark.parametrize("failure", [httpx.Response(500), httpx.ReadError("reset")], ids=["500", "exception"])
def test_a_failed_request_is_retried_until_it_succeeds(
    failures: int, failure: httpx.Response | Exception
) -> None:
    provider, sleep = Provider(*[failure] * failures, OK), RecordedSleep()
    assert ask(endpoint(provider, sleep=sleep)) == "Paris"
    assert provider.requests == [{"model": "large", "messages": HELLO}] * (failures + 1)
    assert len(sleep) == failures


def test_time_ends_a_call_and_not_the_number_of_its_requests() -> None:
    """A bug: retries ended after 8 s though a model takes longer to load, and 429s last a minute."""
    provider, clock = Provider(httpx.Response(503, json=error_of("Loading\nmodel"))), MovingClock()
    with pytest.raises(
        EnvError, match=r"large did not reply: in 600 s, the last .*: HTTP 503: Loading model$"
    ):
        ask(endpoint(provider, sleep=clock))
    assert 560 < sum(clock) < 700 and len(provider.requests) > 30


def test_a_loading_server_is_waited_for_with_one_line(caplog) -> None:
    loading = httpx.Response(503, json=error_of(f"Loading\nmodel for {KEY}"))
    source = endpoint(Provider(*[loading] * 40, OK))
    assert ask_at_once(source, 4) == ["Paris"] * 4
    assert ask(endpoint(Provider(httpx.Response(429), OK))) == "Paris"  # a short wait is no news
    assert [record.message for record in caplog.records] == [
        "waiting for large at https://llm.test/v1: HTTP 503: Loading model for [key]"
    ]


def test_each_outage_has_its_line(caplog) -> None:
    """A bug: the second one of a run was waited for without a word."""
    loading = httpx.Response(503, headers={"retry-after": "20"})
    source = endpoint(Provider(loading, loading, OK, loading, OK))
    assert [ask(source), ask(source)] == ["Paris"] * 2
    assert len(caplog.records) == 2


def test_of_answers_that_are_no_replies_a_call_gets_six() -> None:
    provider, account = Provider(httpx.Response(200, json={})), RecordedAccount()
    outcome = asyncio.run(outcome_of(endpoint(provider), account=account))
    assert outcome.reason == (
        "large did not reply: in 6 requests, the last problem: the response is no chat completion: "
        "check the base URL, which often ends in /v1; it says: {}"
    )
    assert len(provider.requests) == account.requests == account.lost == MOST_ANSWERS


@pytest.mark.parametrize(
    ("status", "body", "wait"),
    [
        (429, {"error": {"code": 429, "details": [{"retryDelay": "19.5s"}]}}, 19.5),
        (200, {"error": {"code": 429, "retryDelay": "0.25s"}}, 0.25),
        (503, {"error": {"message": "loading", "retry_after": 25}}, 25),
        (429, {"error": {"message": "busy", "retry_after_ms": 1500}}, 1.5),
    ],
)
def test_the_wait_is_read_from_the_body_too(status: int, body: dict[str, object], wait: float) -> None:
    """A bug: Gemini's delay is only in the body, so six requests were sent within it."""
    sleep, provider = RecordedSleep(), Provider(httpx.Response(status, json=body), OK)
    assert ask(endpoint(provider, sleep=sleep)) == "Paris"
    assert sleep == [wait]


def test_a_requested_wait_delays_all_calls() -> None:
    """A call that has not been sent yet waits as well, and a later, shorter wait shortens none."""
    sleep = RecordedSleep()
    busy = [httpx.Response(503, headers={"Retry-After": seconds}) for seconds in ("20", "1")]
    provider = Provider(*busy, OK)
    environment = endpoint(provider, sleep=sleep)

    async def two_calls() -> None:
        first = asyncio.create_task(reply(environment))
        while not sleep:
            await asyncio.sleep(0)
        await reply(environment)
        await first

    asyncio.run(two_calls())
    assert sleep == pytest.approx([20, 20, 20], abs=1)


def test_waiting_for_a_slot_does_not_count_against_the_deadline() -> None:
    """Forty calls through one slot take longer than the deadline of one call."""

    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.02)
        return httpx.Response(200, json=body_of())

    assert ask_at_once(endpoint(slow, concurrency=1, call_deadline=0.4), 40) == ["Paris"] * 40


def test_a_dialogue_keeps_its_own_system_message() -> None:
    own = [{"role": "system", "content": "Be long."}, *HELLO]
    ask(endpoint(provider := Provider(OK), system="Be brief."), own)
    assert [request["messages"] for request in provider.requests] == [own]


@pytest.mark.parametrize(
    ("field", "value", "refusal", "left"),
    [
        ("max_tokens", 9, "Unsupported parameter: 'max_tokens'", {"max_completion_tokens": 9}),
        ("temperature", 0, "Unsupported value: 'temperature' does not support 0 with this model.", {}),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_a_rejected_field_is_left_out_of_all_later_requests(
    field: str, value: object, refusal: str, left: dict[str, object], status: int
) -> None:
    provider, sleep = Provider(httpx.Response(status, json=error_of(refusal)), OK), RecordedSleep()
    environment = endpoint(provider, fields={field: value, "seed": 1}, sleep=sleep)
    assert [ask(environment), ask(environment)] == ["Paris", "Paris"]
    plain = {"model": "large", "messages": HELLO, "seed": 1}
    assert provider.requests == [{**plain, field: value}, {**plain, **left}, {**plain, **left}]
    assert sleep == []


def check(*script: httpx.Response | Exception, **settings: object) -> list[dict[str, object]]:
    """Check an endpoint that answers with these responses, and return the bodies of the requests."""
    provider = Provider(*script)
    asyncio.run(Environment([endpoint(provider, **settings)]).check())
    return provider.requests


@pytest.mark.parametrize("answer", [OK, httpx.Response(503), httpx.ReadError("reset"), httpx.Response(429)])
def test_the_check_asks_once_as_a_game_does_and_a_busy_endpoint_passes(answer) -> None:
    [sent] = check(answer, system="Be brief.", fields={"top_p": 0.5})
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert sent["top_p"] == 0.5


NO_TLS = httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number")  # https for http
PAGE = httpx.Response(200, text="<!doctype html><title>Log in</title>")
LM_STUDIO = {"error": "Unexpected endpoint or method. (POST /chat/completions)"}
NO_ERROR_OBJECT = {"code": 5, "msg": "invalid token", "data": None}
CLOUDFLARE = {"success": False, "errors": [{"code": 5007, "message": "No such model"}]}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.ProxyError("407 Proxy Authentication Required"), r"no server answers \(407 Proxy"),
        (NO_TLS, r"no secure connection .*WRONG_VERSION.*, and http or https"),
        (httpx.RemoteProtocolError("illegal request line"), "check http or https and the port"),  # TLS alert
        (PAGE, r"https://llm.test/v1: the response is a web page: .* ends in /v1; it says: Log in"),
        (httpx.Response(200, json=LM_STUDIO), r"Unexpected .* the base URL\)"),
        (httpx.Response(200, json=CLOUDFLARE), "it says: No such model"),
        (httpx.Response(200, json=NO_ERROR_OBJECT), "it says: invalid token"),
    ],
)
def test_an_endpoint_that_cannot_be_used_fails_the_check(answer, words) -> None:
    """A bug: LM Studio, at a URL without /v1, passed the check, and each call took ten minutes."""
    with pytest.raises(FatalEnvError, match=words):
        check(answer)


def test_a_refused_connection_fails_the_check_and_a_single_page_or_a_temporary_error_does_not() -> None:
    """A bug: a good endpoint was refused as a web page because a proxy before it was busy once."""
    with pytest.raises(FatalEnvError, match="9/v1: no server answers"):
        asyncio.run(Environment([endpoint(base_url="http://127.0.0.1:9/v1")]).check())
    assert len(check(PAGE, PAGE, OK)) == 3
    busy = {"error": {"type": "server_error", "message": "Overloaded"}}
    assert len(check(httpx.Response(200, json=busy))) == 1


def test_a_reply_without_text_fails_the_check() -> None:
    """A bug: with max_tokens above the server's window every reply was empty, and the check passed."""
    with pytest.raises(UsageError, match=r'replied to "Hi" without any text \(length\): check max_tokens'):
        check(httpx.Response(200, json=body_of("", finish="length")), fields={"max_tokens": 9999})


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_server_that_takes_no_system_message_fails_the_check_with_the_flag_to_give(status: int) -> None:
    """A bug: only a 400 whose message named the role did; a 500 passed, and each call took ten minutes."""
    odd = httpx.Response(status, json=error_of("Developer instruction is not enabled"))
    with pytest.raises(UsageError, match=r'takes no system message: give --env-system "" \(.*not enabled'):
        check(odd, OK, odd, system="Be brief.")
    assert len(check(httpx.Response(500), OK, OK, system="Be brief.")) == 3  # it was busy
    if status != 500:
        with pytest.raises(FatalEnvError, match=r"cannot be used: https://llm.test/v1: .*not enabled"):
            check(odd, system="Be brief.")  # something else is wrong


def test_the_check_is_paid_for_once_in_a_run(tmp_path: Path) -> None:
    provider = Provider(OK)
    for _ in range(2):
        asked = Environment([endpoint(provider)], journal=Journal(tmp_path))
        asyncio.run(asked.check())
    assert len(provider.requests) == 1 and Journal(tmp_path).spent.calls == 1


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
    with pytest.raises((EnvError, FatalEnvError)) as caught:
        ask(endpoint(Provider(failure)))
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert "secret" not in str(caught.value).lower()


def test_no_text_of_a_reply_contains_the_key(tmp_path: Path) -> None:
    """A bug: a server that echoed the key as `finish_reason` had it written to the journal."""
    sent = f"You sent {KEY}."
    message = {"content": sent, "reasoning_content": sent.upper()}
    choice = {"message": message, "finish_reason": f"length {KEY.upper()}"}
    response = httpx.Response(200, json={"choices": [choice]})
    asked = Environment([endpoint(Provider(response))], journal=Journal(tmp_path))
    assert asyncio.run(asked.ask(HELLO)) == "You sent [key]."
    line = (tmp_path / "rank0.jsonl").read_text()
    assert '"finish": "length [key]"' in line and KEY.lower() not in line.lower()


def test_a_short_placeholder_key_is_scrubbed_from_errors_only() -> None:
    """Local servers need any key at all: "EMPTY" is no secret, and replies may contain the word."""
    reply = body_of("The set is EMPTY.", reasoning_content="EMPTY?")
    outcome = asyncio.run(outcome_of(endpoint(Provider(httpx.Response(200, json=reply)), key="EMPTY")))
    assert (outcome.text, outcome.reasoning) == ("The set is EMPTY.", "EMPTY?")
    with pytest.raises(FatalEnvError, match=r"bad key \[key\]"):
        ask(endpoint(Provider(httpx.Response(401, json=error_of("bad key EMPTY"))), key="EMPTY"))
