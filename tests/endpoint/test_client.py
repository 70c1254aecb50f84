"""The chat client against scripted transports: repeats, limits, requests, the key, names of environments."""

import asyncio
import json
import random
import time

import httpx
import pytest

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.chat import USUAL_REPLY
from prompt_r1.environments.opening import make_environment
from prompt_r1.errors import EnvError, FatalEnvError, UsageError
from tests.providers import HELLO, KEY, OK, Naps, Provider, ask, body_of, chat, error_of


@pytest.mark.parametrize("failures", [0, 2, 4])
@pytest.mark.parametrize("failure", [httpx.Response(500), httpx.ReadError("reset")], ids=["500", "exception"])
def test_a_request_is_repeated_until_it_succeeds(failures: int, failure: httpx.Response | Exception) -> None:
    provider, naps = Provider(*[failure] * failures, OK), Naps()
    assert ask(chat(provider, sleep=naps)) == "Paris"
    assert provider.requests == [{"model": "large", "messages": HELLO}] * (failures + 1)
    assert len(naps) == failures


def test_after_six_failures_the_call_fails_and_says_why() -> None:
    provider, naps = Provider(httpx.Response(500, json=error_of("out of\nmemory"))), Naps()
    environment = chat(provider, sleep=naps)
    with pytest.raises(EnvError, match=r"in 6 attempts, the last problem: HTTP 500: out of memory$"):
        ask(environment)
    assert (len(provider.requests), len(naps)) == (6, 5)
    assert [environment.counts[name] for name in ("calls", "attempts", "errors")] == [1, 6, 1]


def test_the_requested_wait_replaces_the_back_off() -> None:
    naps = Naps()
    provider = Provider(httpx.Response(500, headers={"Retry-After": "20"}), OK)
    assert ask(chat(provider, sleep=naps)) == "Paris"
    assert naps == [20]


def test_a_busy_provider_cools_down_all_calls() -> None:
    """Only the first call is told to wait; one that has not been sent yet waits as well."""
    naps = Naps()
    provider = Provider(httpx.Response(429, headers={"Retry-After": "20"}), OK)
    environment = chat(provider, sleep=naps)

    async def two_calls() -> None:
        first = asyncio.create_task(environment.ask(HELLO))
        while not naps:
            await asyncio.sleep(0)
        await environment.ask(HELLO)
        await first
        await environment.close()

    asyncio.run(two_calls())
    assert naps == [20, pytest.approx(20, abs=1)]


@pytest.mark.parametrize(("first", "second"), [(60, 5), (5, 60)])
def test_of_two_requested_waits_the_longer_one_counts(first: int, second: int) -> None:
    """Two calls are refused, one a moment after the other; a third call comes after both."""
    naps, both_sent, sent = Naps(), asyncio.Event(), 0

    async def busy(request: httpx.Request) -> httpx.Response:
        nonlocal sent
        sent += 1
        if sent == 1:
            await both_sent.wait()
            return httpx.Response(429, headers={"Retry-After": str(first)})
        if sent == 2:
            both_sent.set()
            while not naps:  # until the first call has been refused
                await asyncio.sleep(0)
            return httpx.Response(429, headers={"Retry-After": str(second)})
        return httpx.Response(200, json=body_of())

    environment = chat(busy, sleep=naps)

    async def calls() -> None:
        await asyncio.gather(environment.ask(HELLO), environment.ask(HELLO))
        await environment.ask(HELLO)
        await environment.close()

    asyncio.run(calls())
    assert naps == [first, pytest.approx(60, abs=1), pytest.approx(60, abs=1)]


def test_a_spent_quota_is_asked_once() -> None:
    provider = Provider(httpx.Response(429, json=error_of("no more", type="insufficient_quota")))
    with pytest.raises(FatalEnvError, match=r"large at https://llm.test/v1 refuses to work: .* no more"):
        ask(chat(provider))
    assert len(provider.requests) == 1


def test_a_call_has_a_deadline_over_all_its_attempts() -> None:
    failing = Provider(httpx.Response(500))
    environment = chat(failing, call_deadline=0.1, max_attempts=10**9, sleep=asyncio.sleep)
    started = time.perf_counter()
    with pytest.raises(EnvError, match=r"in 0.1 s, the last problem: HTTP 500"):
        ask(environment)
    assert time.perf_counter() - started < 2


def test_waiting_for_a_slot_is_not_waiting_for_the_provider() -> None:
    """Forty calls through one slot take longer than one call may."""

    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.02)
        return httpx.Response(200, json=body_of())

    environment = chat(slow, concurrency=1, call_deadline=0.4)

    async def all_calls() -> list[str]:
        replies = await asyncio.gather(*(environment.ask(HELLO) for _ in range(40)))
        await environment.close()
        return replies

    assert asyncio.run(all_calls()) == ["Paris"] * 40


def test_there_are_never_more_requests_at_once_than_allowed() -> None:
    running, peak = 0, 0
    statuses = random.Random(0)

    async def busy(request: httpx.Request) -> httpx.Response:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.002)
        running -= 1
        return httpx.Response(statuses.choice([200, 500]), json=body_of())

    environment = chat(busy, concurrency=7, max_attempts=50)

    async def all_calls() -> None:
        await asyncio.gather(*(environment.ask(HELLO) for _ in range(100)))
        await environment.close()

    asyncio.run(all_calls())
    assert peak == 7


# --- Requests ---


def test_the_system_text_opens_dialogues_that_have_none() -> None:
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
        ("max_tokens", 9, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
         {"max_completion_tokens": 9}),
        ("temperature", 0, "Unsupported value: 'temperature' does not support 0 with this model.", {}),
        ("top_p", 0.5, "top_p is not allowed", {}),
        ("stop", ["x"], "'stop' is not supported with this model", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("status", [400, 422])
def test_a_refused_field_is_left_out_from_then_on(
    field: str, value: object, refusal: str, left: dict[str, object], status: int
) -> None:
    provider, naps = Provider(httpx.Response(status, json=error_of(refusal)), OK), Naps()
    environment = chat(provider, fields={field: value, "seed": 1}, max_attempts=1, sleep=naps)
    assert [ask(environment), ask(environment)] == ["Paris", "Paris"]
    plain = {"model": "large", "messages": HELLO, "seed": 1}
    assert provider.requests == [{**plain, field: value}, {**plain, **left}, {**plain, **left}]
    assert naps == []


def test_calls_that_are_refused_together_adapt_once() -> None:
    async def modern(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.001)
        if "max_tokens" in json.loads(request.content):
            return httpx.Response(400, json=error_of("no", param="max_tokens"))
        return httpx.Response(200, json=body_of())

    environment = chat(modern, fields={"max_tokens": 5})

    async def all_calls() -> list[str]:
        replies = await asyncio.gather(*(environment.ask(HELLO) for _ in range(10)))
        await environment.close()
        return replies

    assert asyncio.run(all_calls()) == ["Paris"] * 10
    assert environment.counts["attempts"] == 20


def test_a_field_that_was_not_sent_cannot_be_left_out() -> None:
    provider = Provider(httpx.Response(400, json=error_of("temperature", param="temperature")))
    with pytest.raises(FatalEnvError, match="HTTP 400: temperature"):
        ask(chat(provider))
    assert len(provider.requests) == 1


def test_a_lone_surrogate_can_be_sent() -> None:
    provider = Provider(OK)
    assert ask(chat(provider), [{"role": "user", "content": "a\ud800b"}]) == "Paris"


def test_outcomes_and_tokens_are_counted_and_told() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    response = {**body_of("", finish="length", reasoning="Hm."), "usage": usage}
    environment = chat(Provider(httpx.Response(200, json=response)))
    outcome = asyncio.run(environment.call(HELLO))
    told = {"finish": "length", "reasoning": "Hm.", "tokens_in": 7, "tokens_out": 5}
    assert outcome == Outcome("outcome", label="length", **told)
    assert environment.counts["outcome/length"] == 1 and environment.counts["errors"] == 0
    assert (environment.counts["tokens_in"], environment.counts["tokens_out"]) == (7, 5)


def test_one_environment_serves_one_event_loop_after_the_other() -> None:
    environment = chat(Provider(OK))
    for _ in range(2):  # never closed in between
        assert asyncio.run(environment.ask(HELLO)) == "Paris"


# --- The key ---


@pytest.mark.parametrize("failure", [
    httpx.Response(401, json=error_of(f"bad key {KEY}")),
    httpx.Response(401, json=error_of("x" * 280 + KEY)),  # the reason is cut within the key
    httpx.Response(500, json=error_of(f"header Bearer {KEY.upper()}")),
    httpx.Response(400, json={"detail": [{"headers": {"authorization": KEY.lower()}}]}),
    httpx.ConnectError(f"Illegal header value b'Bearer {KEY}'"),
])  # fmt: skip
def test_no_exception_shows_the_key(failure: httpx.Response | Exception) -> None:
    with pytest.raises((EnvError, FatalEnvError)) as caught:
        ask(chat(Provider(failure)))
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert "secret" not in str(caught.value).lower()


def test_a_reply_that_echoes_the_key_is_scrubbed() -> None:
    assert ask(chat(Provider(httpx.Response(200, json=body_of(f"You sent {KEY}."))))) == "You sent [key]."


def test_reasoning_that_echoes_the_key_is_scrubbed() -> None:
    """The journal records it."""
    response = httpx.Response(200, json=body_of("Paris", reasoning_content=f"I was sent {KEY.upper()}."))
    assert asyncio.run(chat(Provider(response)).call(HELLO)).reasoning == "I was sent [key]."


def test_a_placeholder_key_is_a_word_that_replies_may_say() -> None:
    """Local servers want some key: "EMPTY" is no secret, except in errors, where nobody misses it."""
    reply = body_of("The set is EMPTY.", reasoning_content="EMPTY?")
    outcome = asyncio.run(chat(Provider(httpx.Response(200, json=reply)), api_key="EMPTY").call(HELLO))
    assert (outcome.text, outcome.reasoning) == ("The set is EMPTY.", "EMPTY?")
    with pytest.raises(FatalEnvError, match=r"bad key \[key\]"):
        ask(chat(Provider(httpx.Response(401, json=error_of("bad key EMPTY"))), api_key="EMPTY"))


@pytest.mark.parametrize("key", ["sk-Secret\n0123", "sk-Secret 0123", "sk-Secrét", "sk-Secret\0"])
def test_a_key_that_is_no_header_is_refused_unseen(key: str) -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as caught:
        chat(Provider(OK), api_key=key)
    assert "Secr" not in str(caught.value)


def test_blanks_around_the_key_are_no_part_of_it() -> None:
    provider = Provider(OK)
    ask(chat(provider, api_key=f" {KEY}\r\n"))
    assert provider.headers[0]["authorization"] == f"Bearer {KEY}"


def test_without_a_key_nothing_is_sent_in_its_place() -> None:
    provider = Provider(OK)
    ask(chat(provider, api_key=""))
    assert "authorization" not in provider.headers[0]


# --- Names of environments ---


@pytest.mark.parametrize("spec", [
    "", "mini-z", "hf:models/x", "gpt@localhost:8000", "http://localhost:8000/v1", "a b", "mini,mini-z",
    "x@http://", "x@http://user:Secret@host/v1", "x@http://host/v1?key=Secret", "x@ftp://host/v1", "x@http://h:port/v1",
])  # fmt: skip
def test_an_environment_that_cannot_be_is_a_usage_error(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(UsageError):
        make_environment(spec)


def test_a_missing_key_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match=r"at https://api.openai.com/v1 needs a key: set OPENAI_API_KEY"):
        make_environment("gpt-4o-mini")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    assert make_environment("gpt-4o-mini").name == "gpt-4o-mini"


def test_a_model_is_named_alone_or_with_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for spec in ("meta-llama/Llama-3:free", "meta-llama/Llama-3:free@https://openrouter.ai/api/v1/"):
        assert make_environment(spec).name == "meta-llama/Llama-3:free"


@pytest.mark.parametrize(("spec", "beside", "keys"), [
    ("gpt-4o-mini", (), [KEY]), ("llama@http://gpu7:8000/v1", (), [KEY]),
    ("gpt-4o-mini,llama@http://gpu7:8000/v1", (), [KEY, ""]),
    ("llama@http://gpu7:8000/v1,oss@http://gpu8:8000/v1,mini", (), [KEY, KEY]),
    ("llama@http://gpu7:8000/v1", ("gpt-4o", "mini"), [""]),
    ("llama@http://gpu7:8000/v1", ("oss@http://gpu8:8000/v1", "mini,hf:DIR,none,mini-optimizer"), [KEY]),
    ("gpt-4o-mini", ("llama@http://gpu7:8000/v1",), [KEY]),
])  # fmt: skip
def test_a_providers_key_does_not_go_to_the_hosts_beside_it(
    spec: str, beside: tuple[str, ...], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    sources = [member._source for member in make_environment(spec, beside=beside).members]

    async def keys_sent() -> list[str]:
        chats = [source for source in sources if hasattr(source, "_connect")]
        clients = [source._connect().client for source in chats]
        sent = [client.headers.get("authorization", "").removeprefix("Bearer ") for client in clients]
        for source in chats:
            await source.close()
        return sent

    assert asyncio.run(keys_sent()) == keys


def test_the_mini_worlds_are_environments() -> None:
    for spec in ("mini", "mini-b", "mini-mute"):
        environment = make_environment(spec, seed=1)
        assert isinstance(asyncio.run(environment.ask(HELLO)), str)
        asyncio.run(environment.close())


def test_our_own_limit_a_minute_spreads_the_calls() -> None:
    naps = Naps()
    environment = chat(Provider(OK), requests_per_minute=60, sleep=naps)

    async def three_calls() -> None:
        await asyncio.gather(*(environment.ask(HELLO) for _ in range(3)))
        await environment.close()

    asyncio.run(three_calls())
    assert naps == [pytest.approx(1, abs=0.2), pytest.approx(2, abs=0.2)]


@pytest.mark.parametrize(
    ("usage", "second_waits"),
    [
        ({}, 1.0),  # nothing is known: the estimate stands
        ({"usage": {"prompt_tokens": 400, "completion_tokens": 10}}, 2.0),
        ({"usage": {"prompt_tokens": None, "completion_tokens": "many"}}, 1.0),
    ],
)
def test_a_limit_of_tokens_counts_what_a_call_took_or_else_what_was_estimated(
    usage: dict[str, object], second_waits: float
) -> None:
    estimate = len(HELLO[0]["content"]) // 4 + USUAL_REPLY
    provider, naps = Provider(httpx.Response(200, json={**body_of(), **usage})), Naps()
    environment = chat(provider, tokens_per_minute=60 * estimate, sleep=naps)  # a usual call a second

    async def two_calls() -> None:
        for _ in range(2):
            await environment.ask(HELLO)
        await environment.close()

    asyncio.run(two_calls())
    assert naps == [pytest.approx(second_waits, abs=0.2)]
