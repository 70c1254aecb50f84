"""The environment client against scripted transports and a hostile server on this machine."""

import asyncio
import gzip
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.environments import make_environment
from prompt_r1.environments.chat import ChatEnvironment
from prompt_r1.environments.retry import Outcome, back_off, classify, requested_wait
from prompt_r1.types import EnvError, FatalEnvError, UsageError

KEY = "sk-Secret-0123456789-abcdef"
HELLO = [{"role": "user", "content": "Where is the Louvre?"}]
Respond = Callable[[httpx.Request], Awaitable[httpx.Response]]
NOW = 1_700_000_000.0


def body_of(content: object = "Paris", *, finish: str = "stop", **message: object) -> dict[str, object]:
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": finish}]}


def error_of(message: str, **fields: object) -> dict[str, object]:
    return {"error": {"message": message, **fields}}


def judge(status: int, body: object) -> Outcome:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return classify(status, {}, content, now=NOW)


class Provider:
    """Gives its scripted responses one after the other, the last one for ever; remembers the requests."""

    def __init__(self, *script: httpx.Response | Exception) -> None:
        self.script = list(script)
        self.requests: list[dict[str, object]] = []
        self.headers: list[httpx.Headers] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        self.headers.append(request.headers)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return httpx.Response(step.status_code, headers=step.headers, content=step.content)


class Naps(list[float]):
    """A sleep that only notes how long it should have slept."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


def chat(respond: Respond, **settings: object) -> ChatEnvironment:
    defaults = {"model": "large", "base_url": "https://llm.test/v1", "api_key": KEY, "sleep": Naps()}
    return ChatEnvironment(transport=httpx.MockTransport(respond), **{**defaults, **settings})


def ask(environment: ChatEnvironment, messages: list[dict[str, str]] = HELLO) -> str:
    async def one_call() -> str:
        try:
            return await environment.ask(messages)
        finally:
            await environment.close()

    return asyncio.run(one_call())


OK = httpx.Response(200, json=body_of())


# --- What a response means ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Paris", "Paris"),
        ([{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris"}], "Paris"),
        (["Pa", {"type": "image_url", "image_url": {}}, "ris"], "Paris"),
        ("Pa\ud800ris\0", "Pa?ris"),
    ],
)
def test_text_and_lists_of_parts_are_replies(content: object, text: str) -> None:
    assert judge(200, body_of(content)) == Outcome("ok", text=text, finish="stop")


def test_reasoning_is_recorded_and_never_the_reply() -> None:
    outcome = judge(200, body_of("Paris", reasoning_content="The Louvre …"))
    assert (outcome.text, outcome.reasoning) == ("Paris", "The Louvre …")
    assert judge(200, body_of(None, reasoning="The Louvre …")).verdict == "retry"


@pytest.mark.parametrize(
    ("status", "body", "label", "text"),
    [
        (200, body_of(None, refusal="I cannot help."), "refusal", "I cannot help."),
        (200, body_of("", finish="content_filter"), "content_filter", ""),
        (200, body_of("", finish="length"), "length", ""),
        (400, error_of("too long", code="context_length_exceeded"), "context_length", ""),
        (400, error_of("maximum context length is 4096 tokens, max_tokens 9"), "context_length", ""),
        (413, b"", "context_length", ""),
        (400, error_of("filtered", code="content_filter"), "content_filter", ""),
    ],
)
def test_what_the_environment_did_itself_is_kept(status: int, body: object, label: str, text: str) -> None:
    outcome = judge(status, body)
    assert (outcome.verdict, outcome.label, outcome.text) == ("outcome", label, text)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((status, b"") for status in (408, 409, 425, 429, 500, 502, 503, 504, 529)),
        (200, error_of("Provider returned error", code=502)),
        (200, {"choices": []}),
        (200, {"choices": [None]}),
        (200, {"choices": "none"}),
        (200, {}),
        (200, []),
        (200, b""),
        (200, b"<html><body>Bad gateway</body></html>"),
        (200, json.dumps(body_of()).encode()[:-9]),
        (200, b"[" * 100_000),
        (200, b"\xff\xfe\x00"),
        (200, body_of(None)),
        (200, body_of("  \n")),
        (200, body_of({"text": 3})),
        (200, body_of(None, finish="tool_calls")),
    ],
)
def test_what_may_pass_is_tried_again(status: int, body: object) -> None:
    assert judge(status, body).verdict == "retry"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, error_of("Incorrect API key"), "Incorrect API key"),
        (402, {"error": "Payment required"}, "credit"),
        (403, {"message": "Not in your country"}, "Not in your country"),
        (404, error_of("The model `larg` does not exist", code="model_not_found"), "`larg`"),
        (404, b"<html>nginx</html>", "base URL"),
        (429, error_of("You exceeded your current quota", code="insufficient_quota"), "quota"),
        (400, [error_of("API key not valid")], "API key not valid"),
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}, "Field required"),
        (301, b"", "301"),
    ],
)
def test_what_cannot_pass_is_fatal_in_the_provider_s_words(status: int, body: object, words: str) -> None:
    outcome = judge(status, body)
    assert outcome.verdict == "fatal" and words in outcome.reason


@given(st.integers(100, 599), st.binary() | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["error", "choices", "message", "content", "refusal", "usage", "code"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_response_makes_the_client_stumble(status: int, body: bytes) -> None:
    assert judge(status, body).verdict in ("ok", "outcome", "retry", "fatal")


# --- Waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("20", 20), ("0.5", 0.5), ("120", 120), ("0", None), ("-10", None), ("121", None), ("9" * 35, None),
        ("inf", None), ("nan", None), ("", None), ("soon", None),
        (formatdate(NOW + 20, usegmt=True), 20), (formatdate(NOW - 20, usegmt=True), None),
        (formatdate(NOW + 500, usegmt=True), None), ("Mon, 99 Nov 99999 99:99:99 GMT", None),
    ],
)  # fmt: skip
def test_retry_after_is_honoured_where_it_can_be_believed(value: str, wait: float | None) -> None:
    assert requested_wait({"retry-after": value}, now=NOW) == wait


def test_milliseconds_go_before_seconds() -> None:
    assert requested_wait({"retry-after-ms": "1500", "retry-after": "20"}, now=NOW) == 1.5
    assert requested_wait({"retry-after-ms": "nan", "retry-after": "20"}, now=NOW) == 20


@given(st.text())
def test_no_header_makes_the_client_stumble(value: str) -> None:
    wait = requested_wait({"retry-after": value, "retry-after-ms": value}, now=NOW)
    assert wait is None or 0 < wait <= 120


def test_back_off_has_full_jitter_under_a_doubling_limit() -> None:
    rng = random.Random(0)
    for failures, limit in enumerate((0.5, 1, 2, 4, 8, 16, 30, 30), start=1):
        waits = [back_off(failures, rng) for _ in range(500)]
        assert 0 <= min(waits) < 0.05 * limit and 0.95 * limit < max(waits) <= limit


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


# --- Requests -------------------------------------------------------------------------------------


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


# --- The key --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [
    httpx.Response(401, json=error_of(f"bad key {KEY}")),
    httpx.Response(401, json=error_of("x" * 295 + KEY)),
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


# --- A server on this machine ---------------------------------------------------------------------


class HostileServer:
    """Speaks HTTP badly, in the way that the first part of the path names."""

    def __init__(self) -> None:
        self.open = 0
        self.base_url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["HostileServer"]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
            async with asyncio.timeout(3):  # every test: no connection left open
                while self.open:
                    await asyncio.sleep(0.005)
        finally:
            server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.lower().split("content-length:")[1].split()[0])
                await reader.readexactly(length)
                await getattr(self, head.split("/")[1])(writer, head)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    def respond(self, writer: asyncio.StreamWriter, status: str, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)

    async def good(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "200 OK", json.dumps(body_of()).encode())

    async def echo(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "401 Unauthorized", json.dumps(error_of(head)).encode())

    async def drip(self, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def hang(self, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")

    async def reset(self, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        raise ConnectionResetError

    async def bomb(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "200 OK", GZIP_BOMB, "Content-Encoding: gzip")

    async def badzip(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "200 OK", b"no gzip at all", "Content-Encoding: gzip")

    async def noise(self, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(b"\0\1\2 this is not HTTP\r\n\r\n")
        await writer.drain()
        raise ConnectionResetError


GZIP_BOMB = gzip.compress(bytes(50_000_000), compresslevel=6)


def ask_server(fault: str, **settings: object) -> str:
    """One call of a local endpoint that has `fault`; checks that no connection is left open."""

    async def one_call() -> str:
        async with HostileServer().running() as server:
            defaults = {"model": "large", "base_url": f"{server.base_url}/{fault}", "api_key": KEY}
            patience = {"max_attempts": 2, "sleep": Naps()}
            environment = ChatEnvironment(**{**defaults, **patience, **settings})
            try:
                return await environment.ask(HELLO)
            finally:
                await environment.close()

    return asyncio.run(one_call())


@pytest.mark.parametrize(
    ("fault", "timeout", "words"),
    [
        ("drip", 0.3, "no whole response within 0.3 s"),
        ("hang", 0.3, "no whole response within 0.3 s"),
        ("reset", 9, "ReadError|RemoteProtocolError"),
        ("bomb", 9, "over 10,000,000 bytes"),
        ("badzip", 9, "DecodingError"),
        ("noise", 9, "RemoteProtocolError"),
    ],
)
def test_a_hostile_server_costs_one_call_and_no_connection(fault: str, timeout: float, words: str) -> None:
    started = time.perf_counter()
    with pytest.raises(EnvError, match=words):
        ask_server(fault, attempt_timeout=timeout)
    assert time.perf_counter() - started < 8


def test_a_server_that_echoes_the_authorization_does_not_get_it_shown() -> None:
    with pytest.raises(FatalEnvError, match=r"uthorization: Bearer \[key\]") as caught:
        ask_server("echo")
    assert KEY not in str(caught.value)


def test_nobody_there_is_a_failed_call() -> None:
    with pytest.raises(EnvError, match="ConnectError"):
        ask_server("good", base_url="http://127.0.0.1:9")


def test_a_cancelled_call_closes_its_connection_and_frees_its_slot() -> None:
    async def cancel_then_ask() -> str:
        async with HostileServer().running() as server:
            environment = ChatEnvironment(model="large", base_url=f"{server.base_url}/hang", concurrency=1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await environment.ask(HELLO)
            for _ in range(100):
                await asyncio.sleep(0.005)
                if not server.open:
                    break
            assert not server.open
            with pytest.raises(
                TimeoutError
            ):  # it gets the slot and hangs again; it does not wait for the slot
                async with asyncio.timeout(0.1):
                    await environment.ask(HELLO)
            assert environment.counts["attempts"] == 2
            await environment.close()
            return "done"

    assert asyncio.run(cancel_then_ask()) == "done"


def test_a_local_endpoint_needs_no_key_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def one_call() -> str:
        async with HostileServer().running() as server:
            environment = make_environment(f"large@{server.base_url}/good", max_attempts=1)
            try:
                return await environment.ask(HELLO)
            finally:
                await environment.close()

    assert asyncio.run(one_call()) == "Paris"


# --- Names of environments ------------------------------------------------------------------------


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


def test_the_mini_worlds_are_environments() -> None:
    for spec in ("mini", "mini-b", "mini-mute"):
        environment = make_environment(spec, seed=1)
        assert isinstance(asyncio.run(environment.ask(HELLO)), str)
        asyncio.run(environment.close())
