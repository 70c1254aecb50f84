"""The HTTP client against scripted responses: retries, limits, requests, the key."""

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from prompt_r1.endpoint.client import CALLS_OF_AN_ITERATION
from prompt_r1.endpoint.request import LONGEST_TEXT, ApiKey
from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.chat import ChatEnvironment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.metered import MeteredEnvironment
from prompt_r1.errors import EnvError, FatalEnvError, UsageError
from prompt_r1.types import Message
from tests.support.providers import (
    HELLO,
    KEY,
    OK,
    Provider,
    RecordedSleep,
    ask,
    body_of,
    chat,
    error_of,
    reply,
)


def ask_at_once(environment: ChatEnvironment, count: int) -> list[str]:
    """The texts of concurrent calls, in an event loop of their own."""

    async def calls() -> list[str]:
        return await asyncio.gather(*(reply(environment) for _ in range(count)))

    return asyncio.run(calls())


@pytest.mark.parametrize("failures", [0, 2, 4])
@pytest.mark.parametrize("failure", [httpx.Response(500), httpx.ReadError("reset")], ids=["500", "exception"])
def test_a_failed_request_is_retried_until_it_succeeds(
    failures: int, failure: httpx.Response | Exception
) -> None:
    provider, sleep = Provider(*[failure] * failures, OK), RecordedSleep()
    assert ask(chat(provider, sleep=sleep)) == "Paris"
    assert provider.requests == [{"model": "large", "messages": HELLO}] * (failures + 1)
    assert len(sleep) == failures


def test_after_six_failures_the_call_fails_with_the_last_reason() -> None:
    provider, sleep = Provider(httpx.Response(500, json=error_of("out of\nmemory"))), RecordedSleep()
    environment = chat(provider, sleep=sleep)
    with pytest.raises(EnvError, match=r"in 6 attempts, the last problem: HTTP 500: out of memory$"):
        ask(environment)
    assert (len(provider.requests), len(sleep)) == (6, 5)


def test_the_wait_that_the_provider_requests_replaces_the_back_off() -> None:
    sleep = RecordedSleep()
    provider = Provider(httpx.Response(500, headers={"Retry-After": "20"}), OK)
    assert ask(chat(provider, sleep=sleep)) == "Paris"
    assert sleep == [20]


@pytest.mark.parametrize(("status", "waits"), [(429, [20, 20]), (503, [20, 20]), (500, [20])])
def test_a_busy_provider_delays_all_calls_and_a_broken_one_its_own(status: int, waits: list[float]) -> None:
    """Only the first call gets the error; a call that has not been sent yet waits as well, or not."""
    sleep = RecordedSleep()
    provider = Provider(httpx.Response(status, headers={"Retry-After": "20"}), OK)
    environment = chat(provider, sleep=sleep)

    async def two_calls() -> None:
        first = asyncio.create_task(reply(environment))
        while not sleep:
            await asyncio.sleep(0)
        await reply(environment)
        await first

    asyncio.run(two_calls())
    assert sleep == pytest.approx(waits, abs=1)


@pytest.mark.parametrize(("first", "second"), [(60, 5), (5, 60)])
def test_the_longer_of_two_requested_waits_applies(first: int, second: int) -> None:
    """Two calls get a 429, one shortly after the other; a third call starts after both."""
    sleep, both_sent, sent = RecordedSleep(), asyncio.Event(), 0

    async def busy(request: httpx.Request) -> httpx.Response:
        nonlocal sent
        sent += 1
        if sent == 1:
            await both_sent.wait()
            return httpx.Response(429, headers={"Retry-After": str(first)})
        if sent == 2:
            both_sent.set()
            while not sleep:  # until the first call has got its 429
                await asyncio.sleep(0)
            return httpx.Response(429, headers={"Retry-After": str(second)})
        return httpx.Response(200, json=body_of())

    environment = chat(busy, sleep=sleep)

    async def calls() -> None:
        await asyncio.gather(reply(environment), reply(environment))
        await reply(environment)

    asyncio.run(calls())
    assert sleep == [first, pytest.approx(60, abs=1), pytest.approx(60, abs=1)]


def test_insufficient_quota_is_not_retried() -> None:
    provider = Provider(httpx.Response(429, json=error_of("no more", type="insufficient_quota")))
    with pytest.raises(FatalEnvError, match=r"large cannot be used: .* no more"):
        ask(chat(provider))
    assert len(provider.requests) == 1


def test_a_call_has_a_deadline_over_all_its_attempts() -> None:
    failing = Provider(httpx.Response(500))
    environment = chat(failing, call_deadline=0.1, max_attempts=10**9, sleep=asyncio.sleep)
    started = time.perf_counter()
    with pytest.raises(EnvError, match=r"in 0.1 s, the last problem: HTTP 500"):
        ask(environment)
    assert time.perf_counter() - started < 2


def test_a_deadline_during_back_off_counts_the_attempt_before_it_once() -> None:
    """A response without choices was sent for, and perhaps billed; one with status 500 was not."""

    async def sleep_past_the_deadline(_: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now + 700
        await asyncio.Event().wait()

    for status, lost in ((200, 1), (500, 0)):

        async def respond(request: httpx.Request, status: int = status) -> httpx.Response:
            await request.extensions["trace"]("http11.send_request_body.complete", {})
            return httpx.Response(status, json={})

        environment = chat(respond, call_deadline=600, sleep=sleep_past_the_deadline)
        outcome = asyncio.run(environment.call(HELLO))
        assert (outcome.verdict, outcome.lost) == ("retry", lost)
        assert outcome.reason.startswith("in 600 s, the last problem")


def test_waiting_for_a_slot_does_not_count_against_the_deadline() -> None:
    """Forty calls through one slot take longer than the deadline of one call."""

    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.02)
        return httpx.Response(200, json=body_of())

    assert ask_at_once(chat(slow, concurrency=1, call_deadline=0.4), 40) == ["Paris"] * 40


def test_concurrency_is_never_exceeded() -> None:
    running, peak = 0, 0
    statuses = random.Random(0)

    async def busy(request: httpx.Request) -> httpx.Response:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.002)
        running -= 1
        return httpx.Response(statuses.choice([200, 500]), json=body_of())

    ask_at_once(chat(busy, concurrency=7, max_attempts=50), 100)
    assert peak == 7


# --- Requests ---


def test_the_system_message_is_added_to_dialogues_without_one() -> None:
    provider = Provider(OK)
    ask(chat(provider, system="Be brief."))
    own = [{"role": "system", "content": "Be long."}, *HELLO]
    ask(chat(provider, system="Be brief."), own)
    assert [request["messages"] for request in provider.requests] == [
        [{"role": "system", "content": "Be brief."}, *HELLO],
        own,
    ]


@pytest.mark.parametrize(
    ("field", "value", "refusal", "left"),
    [
        (
            "max_tokens",
            9,
            "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
            {"max_completion_tokens": 9},
        ),
        ("temperature", 0, "Unsupported value: 'temperature' does not support 0 with this model.", {}),
        ("top_p", 0.5, "top_p is not allowed", {}),
        ("stop", ["x"], "'stop' is not supported with this model", {}),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_a_rejected_field_is_left_out_of_all_later_requests(
    field: str, value: object, refusal: str, left: dict[str, object], status: int
) -> None:
    provider, sleep = Provider(httpx.Response(status, json=error_of(refusal)), OK), RecordedSleep()
    environment = chat(provider, fields={field: value, "seed": 1}, max_attempts=1, sleep=sleep)
    assert [ask(environment), ask(environment)] == ["Paris", "Paris"]
    plain = {"model": "large", "messages": HELLO, "seed": 1}
    assert provider.requests == [{**plain, field: value}, {**plain, **left}, {**plain, **left}]
    assert sleep == []


def test_concurrent_calls_that_are_rejected_drop_the_field_once() -> None:
    requests = 0

    async def modern(request: httpx.Request) -> httpx.Response:
        nonlocal requests
        requests += 1
        await asyncio.sleep(0.001)
        if "max_tokens" in json.loads(request.content):
            return httpx.Response(400, json=error_of("no", param="max_tokens"))
        return httpx.Response(200, json=body_of())

    assert ask_at_once(chat(modern, fields={"max_tokens": 5}), 10) == ["Paris"] * 10
    assert requests == 20


def test_an_error_about_a_field_that_was_not_sent_is_fatal() -> None:
    provider = Provider(httpx.Response(400, json=error_of("temperature", param="temperature")))
    with pytest.raises(FatalEnvError, match="HTTP 400: temperature"):
        ask(chat(provider))
    assert len(provider.requests) == 1


def test_a_lone_surrogate_can_be_sent() -> None:
    provider = Provider(OK)
    assert ask(chat(provider), [{"role": "user", "content": "a\ud800b"}]) == "Paris"


def test_an_outcome_has_label_tokens_and_reasoning() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    response = {**body_of("", finish="length", reasoning="Hm."), "usage": usage}
    environment = chat(Provider(httpx.Response(200, json=response)))
    outcome = asyncio.run(environment.call(HELLO))
    counts = {"tokens_in": 7, "tokens_out": 5, "written": 3}
    assert outcome == Outcome("outcome", label="length", finish="length", reasoning="Hm.", **counts)


def test_calls_that_wait_for_a_slot_can_do_so_in_one_event_loop_after_another() -> None:
    """A semaphore that calls wait for cannot be used in another loop."""
    environment = chat(Provider(OK), concurrency=1)
    assert [ask_at_once(environment, 2) for _ in range(2)] == [["Paris", "Paris"]] * 2


# --- The check before a run ---


def check(answers: dict[str, httpx.Response | Exception], **settings: object) -> list[str]:
    """Check an endpoint with these answers by method, and return the methods of the requests."""
    methods = []

    async def respond(request: httpx.Request) -> httpx.Response:
        methods.append(request.method)
        answer = answers[request.method]
        if isinstance(answer, Exception):
            raise answer
        return answer

    asyncio.run(chat(respond, **settings).check())
    return methods


LISTED = httpx.Response(200, json={"data": [{"id": "large"}]})
NOT_LISTED = httpx.Response(200, json={"data": [{"id": "small"}]})


def test_a_listed_model_passes_the_check_without_a_call() -> None:
    assert check({"GET": LISTED}) == ["GET"]


@pytest.mark.parametrize("listed", [NOT_LISTED, httpx.Response(404), httpx.ReadError("reset")])
@pytest.mark.parametrize("answer", [OK, httpx.Response(503), httpx.ReadError("reset")])
def test_a_model_that_is_not_listed_passes_unless_a_call_is_rejected(
    listed: httpx.Response | Exception, answer: httpx.Response | Exception
) -> None:
    assert check({"GET": listed, "POST": answer}) == ["GET", "POST"]


def test_a_wrong_key_or_model_fails_the_check_with_the_url() -> None:
    for status in (401, 404):
        wrong = httpx.Response(status, json=error_of(f"bad: {KEY}"))
        with pytest.raises(FatalEnvError, match=r"large at https://llm.test/v1 cannot be used: .*\[key\]"):
            check({"GET": NOT_LISTED, "POST": wrong})


def test_a_refused_connection_fails_the_check() -> None:
    with pytest.raises(UsageError, match=r"no server answers at https://llm.test/v1: ConnectError"):
        check({"GET": httpx.ConnectError("refused")})


def test_a_server_of_web_pages_fails_the_check() -> None:
    """A bug: it was asked six times, and the advice was to try again later."""
    page = httpx.Response(200, text="<!doctype html><title>Log in</title>")
    with pytest.raises(
        UsageError, match=r"https://llm.test/v1 answers with a web page, .* often ends in /v1"
    ):
        check({"GET": page, "POST": page})
    assert check({"GET": page, "POST": OK}) == ["GET", "POST"]


def test_a_rejected_field_that_can_be_left_out_passes_the_check() -> None:
    rejected = httpx.Response(400, json=error_of("temperature", param="temperature"))
    assert check({"GET": NOT_LISTED, "POST": rejected}, fields={"temperature": 0}) == ["GET", "POST"]


# --- The key ---


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
        ask(chat(Provider(failure)))
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert "secret" not in str(caught.value).lower()


def test_no_text_of_a_reply_contains_the_key(tmp_path: Path) -> None:
    """A bug: a server that echoed the key as `finish_reason` had it written to the journal."""
    sent = f"You sent {KEY}."
    message = {"content": sent, "reasoning_content": sent.upper()}
    choice = {"message": message, "finish_reason": f"length {KEY.upper()}"}
    response = httpx.Response(200, json={"choices": [choice]})
    journal = Journal(tmp_path)
    source = chat(Provider(response))
    environment = MeteredEnvironment(source, journal=journal, budget=Budget(), price=Price())
    assert asyncio.run(environment.call(HELLO)).text == "You sent [key]."
    line = (tmp_path / "rank0.jsonl").read_text()
    assert '"finish": "length [key]"' in line and KEY.lower() not in line.lower()


def test_a_short_placeholder_key_is_scrubbed_from_errors_only() -> None:
    """Local servers need any key at all: "EMPTY" is no secret, and replies may contain the word."""
    reply = body_of("The set is EMPTY.", reasoning_content="EMPTY?")
    outcome = asyncio.run(chat(Provider(httpx.Response(200, json=reply)), key=ApiKey("EMPTY")).call(HELLO))
    assert (outcome.text, outcome.reasoning) == ("The set is EMPTY.", "EMPTY?")
    with pytest.raises(FatalEnvError, match=r"bad key \[key\]"):
        ask(chat(Provider(httpx.Response(401, json=error_of("bad key EMPTY"))), key=ApiKey("EMPTY")))


@pytest.mark.parametrize("key", ["sk-Secret\n0123", "sk-Secret 0123", "sk-Secrét", "sk-Secret\0"])
def test_a_key_that_cannot_be_a_header_is_rejected_without_showing_it(key: str) -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as caught:
        chat(Provider(OK), key=ApiKey(key))
    assert "Secr" not in str(caught.value)


def test_blanks_around_the_key_are_removed() -> None:
    provider = Provider(OK)
    ask(chat(provider, key=ApiKey(f" {KEY}\r\n")))
    assert provider.headers[0]["authorization"] == f"Bearer {KEY}"


def test_without_a_key_there_is_no_authorization_header() -> None:
    provider = Provider(OK)
    ask(chat(provider, key=ApiKey("")))
    assert "authorization" not in provider.headers[0]


# --- Rate limits ---


def test_the_limit_of_requests_per_minute_spreads_the_calls() -> None:
    sleep = RecordedSleep()
    ask_at_once(chat(Provider(OK), requests_per_minute=60, sleep=sleep), 3)
    assert sleep == [pytest.approx(1, abs=0.2), pytest.approx(2, abs=0.2)]


@pytest.mark.parametrize(
    "failure",
    [httpx.Response(500), httpx.Response(400, json=error_of("no", param="max_tokens"))],
    ids=["retry", "rejected field"],
)
def test_another_attempt_counts_against_the_limit_of_requests(failure: httpx.Response) -> None:
    sleep = RecordedSleep()
    provider = Provider(failure, OK)
    assert ask(chat(provider, fields={"max_tokens": 5}, requests_per_minute=60, sleep=sleep)) == "Paris"
    assert sleep == [pytest.approx(1, abs=0.2)]  # longer than the first back-off


def test_many_calls_at_once_start_in_several_turns_of_the_event_loop() -> None:
    """A bug: a thousand calls started in one turn of the event loop, and blocked it for seconds."""
    starts = Counter[int]()
    turn = 0

    async def respond(request: httpx.Request) -> httpx.Response:
        starts[turn] += 1
        return httpx.Response(200, json=body_of())

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def calls() -> list[str]:
        environment = chat(respond, concurrency=300)
        counting = asyncio.create_task(count_turns())
        replies = await asyncio.gather(*(reply(environment) for _ in range(300)))
        counting.cancel()
        return replies

    assert asyncio.run(calls()) == ["Paris"] * 300
    assert starts.total() == 300 and max(starts.values()) <= CALLS_OF_AN_ITERATION


def test_a_reply_of_5_mb_blocks_the_event_loop_for_less_than_50_ms() -> None:
    """A bug: searching it for the key took 60 ms, and every turn that repeated it 60 ms more."""
    text = "".join(random.Random(0).choices("abcdefgh ijklmnop.\n", k=5_000_000))
    environment = chat(Provider(httpx.Response(200, json=body_of(text))))

    async def longest_block() -> float:
        """CPU seconds between two turns of the event loop, during a call and one that repeats its reply."""
        longest, last = 0.0, time.process_time()

        async def watch() -> None:
            nonlocal longest, last
            while True:
                now = time.process_time()
                longest, last = max(longest, now - last), now
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        first = await reply(environment)
        history: list[Message] = [*HELLO, {"role": "assistant", "content": first}, *HELLO]
        await reply(environment, history)
        watching.cancel()
        assert first == text[:LONGEST_TEXT]
        return longest

    assert min(asyncio.run(longest_block()) for _ in range(3)) < 0.05


def test_a_key_at_the_cut_of_a_long_reply_is_scrubbed() -> None:
    """Cut before it is scrubbed, the reply would end with half of the key."""
    text = "a" * (LONGEST_TEXT - 10) + KEY + "b" * 100
    assert ask(chat(Provider(httpx.Response(200, json=body_of(text))))).endswith("a[key]bbbbb")
