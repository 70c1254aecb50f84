"""The served pair, asked with OpenAI's own client and over plain HTTP."""

import asyncio
import itertools
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType

import httpx
import pytest

from prompt_r1.errors import EnvError
from prompt_r1.pair.api import Limits
from tests.support.echo_agent import EchoAgent, paid_environment
from tests.support.pair_server import chat_server, echo_pair, serving_pair
from tests.support.providers import environment_of

MODEL = "prompt-r1"
HELLO = [{"role": "user", "content": "Who is Anna?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_pair(chat_server()) as started:
        yield started


@pytest.fixture(scope="module")
def openai() -> ModuleType:
    """OpenAI's client. Only the worker of these tests spends the second that its import takes."""
    return import_module("openai")


@pytest.fixture
def client_of(openai):
    """A function that makes a client of a URL."""

    def make(url: str, *, key: str = "none", **options: object):
        return openai.OpenAI(base_url=url, api_key=key, **options)

    return make


def post(url: str, body: object, **headers: str) -> httpx.Response:
    """Post a body as it is, or as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    return httpx.post(f"{url}/chat/completions", content=content, headers=headers, timeout=30, verify=False)


def get(url: str, **options: object) -> httpx.Response:
    """Get a page, without TLS. With `verify`, httpx would read certificates first, which takes 25 ms."""
    return httpx.get(url, verify=False, **options)


def ask(url: str, content: object = "Who is Anna?", **fields: object) -> httpx.Response:
    return post(url, {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields})


def test_openais_client_gets_the_answer_and_the_usage(url, client_of):
    with client_of(url) as client:
        reply = client.chat.completions.create(model=MODEL, messages=HELLO)
        assert [model.id for model in client.models.list()] == [MODEL]
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("WHO IS ANNA?", "stop")
    assert choice.message.role == "assistant"
    assert reply.id.startswith("chatcmpl-") and abs(reply.created - time.time()) < 60 and reply.model == MODEL
    assert reply.object == "chat.completion"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.environment == {"calls": 1, "prompt_tokens": 0, "completion_tokens": 0, "usd": 0}


def test_openais_client_streams_the_dialogue_as_reasoning_and_then_the_answer(url, client_of):
    with client_of(url) as client:
        chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "WHO IS ANNA?"
    assert chunks[-1].choices[0].finish_reason == "stop" and chunks[-1].usage.environment["calls"] == 1
    thoughts = [getattr(delta, "reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == (
        "\nAgent thinks: I ask.\nAgent asks: Who is Anna?"
        "\nEnvironment: WHO IS ANNA?\nAgent thinks: Now I know."
    )
    assert len(thoughts) > 20  # it arrives while the agent writes
    kinds = [delta.kind for delta in deltas if hasattr(delta, "kind")]
    assert kinds == ["think", "interaction_prompt", "reply", "think"]


def test_every_event_of_a_stream_says_something(url):
    """A bug: each token of the answer made an empty event."""
    response = ask(url, stream=True)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    first, *others = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert first == {"role": "assistant", "content": ""}
    assert all(delta.get("reasoning_content") or delta.get("content") for delta in others)


def test_a_request_samples_with_its_own_temperature_and_seed():
    """A bug: without a seed it was sampled with 0, not with that of `--seed`."""
    agent = EchoAgent()
    with serving_pair(chat_server(echo_pair(agent, seed=3, temperature=0.7))) as url:
        for fields in ({}, {"temperature": 0, "seed": 3}, {"temperature": 1.5, "seed": 4}, {"seed": 0}):
            assert ask(url, **fields).status_code == 200
    seeds, temperatures, _ = zip(*agent.sampled_with[::2], strict=True)  # the first of two turns
    assert temperatures == (0.7, 0.0, 1.5, 0.7)
    assert [seed.split("/")[0] for seed in seeds] == ["3", "3", "4", "0"]


def test_a_question_that_is_too_long_gets_one_sentence(url):
    response = ask(url, "long " * 5000)
    error = response.json()["error"]
    assert response.status_code == 400 and "tokens of a game of 4000" in error["message"]
    assert error["type"] == "context_length_exceeded"


def test_the_pair_answers_whatever_the_name_of_the_model(url):
    reply = ask(url, model="gpt-4").json()
    assert (reply["model"], reply["choices"][0]["message"]["content"]) == (MODEL, "WHO IS ANNA?")


def test_a_body_may_have_two_million_bytes_and_no_more(url):
    body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
    assert post(url, body.ljust(2_000_000)).status_code == 200
    assert post(url, body.ljust(2_000_001)).status_code == 413
    assert ask(url).status_code == 200


def test_a_body_that_is_too_long_is_refused_before_the_rest_of_it_is_read():
    """A client that sends without end would otherwise fill the memory of the server."""
    read = itertools.count(1)
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        more = next(read) < 50
        return {"type": "http.request", "body": b" " * 1_000_000, "more_body": more}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    asyncio.run(chat_server().app()({**scope, "query_string": b""}, receive, send))
    assert sent[0]["status"] == 413
    assert next(read) <= 4, "two parts fit the limit, and the third exceeds it"


def test_a_web_page_of_another_site_cannot_ask(url):
    """Browsers send text/plain without asking first, and a site can point its name to this machine."""
    body = {"model": MODEL, "messages": HELLO}
    for kind in ("text/plain", "application/jsonp", ""):
        assert post(url, body, **{"Content-Type": kind}).status_code == 400
    for kind in ("Application/JSON", "application/json; charset=utf-8"):
        assert post(url, body, **{"Content-Type": kind}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil", "[::1", ""):
        assert post(url, body, Host=host).status_code == 400
        assert get(f"{url}/models", headers={"Host": host}).status_code == 400
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000"):
        assert get(f"{url}/models", headers={"Host": host}).status_code == 200


def test_with_a_key_only_requests_that_have_it_are_answered(openai, client_of):
    with serving_pair(chat_server(key="secret")) as url:
        with client_of(url, key="secret") as client:
            assert client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content
        with client_of(url, key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(url, key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=MODEL, messages=HELLO)


def test_a_key_with_an_umlaut_is_accepted_as_curl_sends_it() -> None:
    """A bug: no request had the right key."""
    with serving_pair(chat_server(key="schlüssel")) as url:
        headers = {"Authorization": "Bearer schlüssel".encode()}
        assert get(f"{url}/models", headers=headers).status_code == 200


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def ask(self, messages):
        raise self.error


FAILURES = [
    (EnvError("HTTP 500 from the model"), "environment_error", "HTTP 500 from the model"),
    (ZeroDivisionError("mine"), "unusable", "raised ZeroDivisionError: mine"),
    (EnvError("half \ud800 a character"), "environment_error", r"half \? a character"),
]


@pytest.mark.parametrize(("error", "kind", "sentence"), FAILURES)
def test_a_failed_environment_is_an_error_with_a_type_and_never_an_answer(
    error, kind, sentence, capfd, caplog, openai, client_of
):
    """A bug: the error left the application, and the log had 40 lines of traceback."""
    with serving_pair(chat_server(echo_pair(environment=environment_of(Failing(error))))) as url:
        response = ask(url)
        assert response.status_code >= 500 and response.json()["error"]["type"] == kind
        assert re.search(sentence, response.json()["error"]["message"])
        with client_of(url, max_retries=0) as client:
            stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            with pytest.raises(openai.APIError, match=sentence):
                for chunk in stream:
                    assert not chunk.choices[0].delta.content
    assert "Traceback" not in caplog.text and "Traceback" not in capfd.readouterr().err


def test_a_bug_is_logged_with_its_traceback_but_without_keys(monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789abcdef")

    class Broken(EchoAgent):
        async def generate(self, tokens, **options):
            raise ZeroDivisionError("sent sk-0123456789abcdef")

    with serving_pair(chat_server(echo_pair(Broken()))) as url:
        response = ask(url)
    assert response.status_code == 500 and response.json()["error"]["type"] == "internal_error"
    assert "log has the traceback" in response.json()["error"]["message"]
    assert "ZeroDivisionError: sent [key]" in caplog.text and "0123456789" not in caplog.text + response.text


def test_each_game_is_logged_as_one_line(monkeypatch, caplog):
    """Also a failed one, and without what could be a secret or move the cursor of a terminal."""
    monkeypatch.setenv("PROMPT_R1_API_KEY", "a-long-server-key")
    caplog.set_level(logging.INFO, "prompt_r1.pair.server")
    broken = environment_of(Failing(EnvError("a-long-server-key\n\x1b[2J")))
    with serving_pair(chat_server(echo_pair(EchoAgent(max_turns=1)))) as url:
        ask(url)
        ask(url, stream=True)
    with serving_pair(chat_server(echo_pair(environment=broken))) as url:
        ask(url)
    assert [re.sub(r"[\d.]+ s", "N s", record.getMessage()) for record in caplog.records] == [
        "max_turns, 0 calls, N s",
        "max_turns, 0 calls, N s",
        "environment_error: [key] \\x1b[2J",
    ]


def test_a_question_that_is_encoded_does_not_stop_the_server():
    """A bug: the server answered nobody for 13 seconds."""
    agent, encoding, may_end = EchoAgent(), threading.Event(), threading.Event()
    opening = agent.codec.opening

    def slow_opening(question: str) -> list[int]:
        encoding.set()
        assert may_end.wait(20)
        return opening(question)

    agent.codec.opening = slow_opening
    with serving_pair(chat_server(echo_pair(agent))) as url, ThreadPoolExecutor() as clients:
        asked = clients.submit(ask, url)
        try:
            assert encoding.wait(20)
            assert get(f"{url}/models", timeout=5).status_code == 200
        finally:
            may_end.set()
        assert asked.result().status_code == 200


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": MODEL, "messages": HELLO}).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def test_two_requests_that_are_sent_at_once_are_both_answered():
    with serving_pair(chat_server()) as url, connect(url) as client:
        client.sendall(WHOLE * 2)
        received = b""
        client.settimeout(20)
        while received.count(b"WHO IS ANNA?") < 2:
            part = client.recv(10_000)
            assert part, f"closed after {received!r}"
            received += part


def connect(url: str) -> socket.socket:
    """A connection on which a read waits for a tenth of a second."""
    return socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=0.1)


def test_no_question_makes_more_calls_than_the_server_allows():
    with serving_pair(chat_server(echo_pair(EchoAgent(max_turns=3)))) as url:
        reply = ask(url, "9: more than it may").json()
    assert reply["usage"]["environment"]["calls"] == 2
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["refusal"] == "The agent ended without an answer (max_turns)."


def test_limits_in_dollars_and_seconds_are_errors_that_the_client_does_not_repeat():
    pool = paid_environment(max_usd=0.10)
    with serving_pair(chat_server(echo_pair(EchoAgent(seconds=1.0)), limits=Limits(seconds=0.01))) as url:
        slow = ask(url)
    with serving_pair(chat_server(echo_pair(environment=pool), limits=Limits(usd=0.05))) as url:
        assert ask(url, "1: a").json()["usage"]["environment"]["usd"] == pytest.approx(0.02)
        dear = ask(url, "3: a")
        statuses = [ask(url, "1: a").status_code for _ in range(3)]
    assert statuses == [200, 200, 402]  # the budget of the whole server
    assert (slow.status_code, slow.json()["error"]["type"]) == (504, "time_limit")
    assert (dear.status_code, dear.json()["error"]["type"]) == (402, "budget_exhausted")
    assert slow.headers["x-should-retry"] == dear.headers["x-should-retry"] == "false"
    assert pool.budget.charged.usd <= 0.10


def test_a_client_that_leaves_before_its_stream_is_read_pays_for_nothing():
    """The iterator of events never ran, and the game was played to its end."""
    agent, pool = EchoAgent(seconds=0.05), paid_environment()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "3: Who?"}], "stream": True}
    received = [{"type": "http.request", "body": json.dumps(body).encode()}, {"type": "http.disconnect"}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {"query_string": b"", "asgi": {"spec_version": "2.3"}}

    async def receive():
        return received.pop(0)

    async def send(message):
        await asyncio.sleep(0)  # as for a full socket

    async def leave():
        await chat_server(echo_pair(agent, pool)).app()(scope, receive, send)
        await asyncio.sleep(0.5)  # a game of the echoing agent takes less

    asyncio.run(leave())
    assert not received and agent.running == 0 and pool.budget.charged.calls == 0


def test_a_client_that_disconnects_ends_its_game_quietly(capfd):
    """The server logged a traceback for each of them."""
    agent = EchoAgent(seconds=30)
    with serving_pair(chat_server(echo_pair(agent))) as url:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                body = {"model": MODEL, "messages": HELLO, "stream": stream}
                httpx.post(f"{url}/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.2))
            deadline = time.monotonic() + 5
            while agent.running:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    assert len(agent.sampled_with) == 2 and capfd.readouterr().err == ""


def test_a_client_that_leaves_while_it_sends_its_question_is_not_logged(capfd):
    """The server logged a traceback for each of them."""
    with serving_pair(chat_server()) as url:
        with connect(url) as client:
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            )
            client.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        assert ask(url).status_code == 200
    assert capfd.readouterr().err == ""


def test_no_other_site_may_show_the_page_in_a_frame(url):
    """Otherwise it could lead its reader to ask, which costs money."""
    page = get(url.removesuffix("/v1"))
    assert page.headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def test_the_page_reads_no_body(url, capfd):
    """A bug: a page with a body of three megabytes was an error with a traceback."""
    page = httpx.request("GET", url.removesuffix("/v1"), content=b" " * 3_000_000, verify=False)
    assert page.status_code in (200, 413) and capfd.readouterr().err == ""


def test_at_its_end_a_server_closes_the_connections_of_its_environment(monkeypatch):
    pair, closed = echo_pair(), []

    async def close() -> None:
        closed.append(True)

    monkeypatch.setattr(pair.environment, "close", close)
    with serving_pair(chat_server(pair)):
        assert not closed
    assert closed == [True]
