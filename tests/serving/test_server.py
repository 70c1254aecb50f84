"""The served pair, asked with OpenAI's own client and over plain HTTP."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import openai
import pytest

from prompt_r1.agent.agent import check_question_lengths
from prompt_r1.chat_template import PieceEncoder
from prompt_r1.environments.specs import pool_of
from prompt_r1.errors import EnvError, FatalEnvError, QuestionTooLong
from prompt_r1.playing import Limits
from prompt_r1.serving.app import make_app
from prompt_r1.types import GameSettings, Question
from tests.serving.running import pair_of, serving
from tests.support.echo_agent import EchoAgent, paid_pool

MODEL = "prompt-r1"
HELLO = [{"role": "user", "content": "Who is Anna?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(pair_of()) as started:
        yield started


def client_of(url: str, *, key: str = "none", **options: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, **options)


def post(url: str, body: object, **headers: str) -> httpx.Response:
    """Post a body as it is, or as JSON."""
    content = body if isinstance(body, bytes | Iterator) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    return httpx.post(f"{url}/chat/completions", content=content, headers=headers, timeout=30)


def ask(url: str, content: object = "Who is Anna?", **fields: object) -> httpx.Response:
    return post(url, {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields})


# --- OpenAI's client ------------------------------------------------------------------------------


def test_openais_client_gets_the_answer_and_the_usage(url):
    with client_of(url) as client:
        reply = client.chat.completions.create(model=MODEL, messages=HELLO)
        assert [model.id for model in client.models.list()] == [MODEL]
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.role) == (
        "WHO IS ANNA?", "stop", "assistant",
    )  # fmt: skip
    assert reply.id.startswith("chatcmpl-") and abs(reply.created - time.time()) < 60 and reply.model == MODEL
    assert reply.object == "chat.completion"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.environment == {"calls": 1, "prompt_tokens": 0, "completion_tokens": 0, "usd": 0}
    assert not hasattr(choice.message, "reasoning_content")


@pytest.mark.parametrize(
    ("fields", "sampled"), [({}, 0.7), ({"temperature": 0}, 0.0), ({"temperature": 1}, 1)]
)
def test_the_temperature_is_the_requests_own_or_else_the_servers(fields, sampled):
    agent, seen = EchoAgent(), set()

    async def generate(tokens, *, temperature, **options):
        seen.add(temperature)
        return await EchoAgent.generate(agent, tokens, temperature=temperature, **options)

    agent.generate = generate
    with serving(replace(pair_of(agent), temperature=0.7)) as url:
        assert ask(url, **fields).status_code == 200
    assert seen == {sampled}


def test_openais_client_streams_the_answer(url):
    with client_of(url) as client:
        options = {"include_usage": True}
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options=options
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "WHO IS ANNA?" and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.environment["calls"] == 1
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) == 4


def test_the_dialogue_is_the_reasoning_when_it_is_requested(url):
    expected = (
        "Agent thinks: I ask.\nAgent asks: Who is Anna?\nEnvironment: WHO IS ANNA?\nAgent thinks: Now I know."
    )
    extra = {"include_reasoning": True}
    with client_of(url) as client:
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra)
        chunks = list(
            client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra, stream=True)
        )
    assert whole.choices[0].message.reasoning_content == expected
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == expected
    pieces = [delta.prompt_r1 for delta in deltas if hasattr(delta, "prompt_r1")]
    assert "".join(piece["text"] for piece in pieces if piece["kind"] == "answer") == "WHO IS ANNA?"
    assert len(pieces) > 20  # it arrives while the agent writes


def test_the_asynchronous_client_asks_many_questions_at_once():
    agent = EchoAgent(seconds=0.05)

    async def ask_all(url: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            questions = [[{"role": "user", "content": f"Number {number}?"}] for number in range(30)]
            replies = await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=asked) for asked in questions)
            )
            return [reply.choices[0].message.content for reply in replies]

    with serving(pair_of(agent)) as url:
        assert asyncio.run(ask_all(url)) == [f"NUMBER {number}?" for number in range(30)]
    assert agent.peak > 10


# --- Requests -------------------------------------------------------------------------------------


def test_earlier_messages_stand_above_the_question(url):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Who made"}, {"type": "text", "text": "X?"}]},
        {"role": "assistant", "content": "Anna."},
        {"role": "user", "content": "And Y?"},
    ]
    reply = post(url, {"model": MODEL, "messages": messages}).json()
    expected = "Earlier messages:\nuser: Who made\nX?\nassistant: Anna.\n\nThe question now: And Y?"
    assert reply["choices"][0]["message"]["content"] == expected.upper()
    with serving(pair_of(history="last")) as other:
        reply = post(other, {"model": MODEL, "messages": messages}).json()
    assert reply["choices"][0]["message"]["content"] == "AND Y?"


class Listing:
    """Replies with the roles and contents that it gets."""

    async def ask(self, messages):
        return " | ".join(f"{message['role']}: {message['content']}" for message in messages)


@pytest.mark.parametrize(
    ("policy", "seen"),
    [
        ("environment", "system: Answer in French. | user: Who is Anna?"),
        ("agent", "user: Answer in French.\n\nWho is Anna?"),
    ],
)
def test_a_system_message_reaches_whom_the_policy_names_and_the_metadata_say_so(policy, seen):
    """System messages vanished in silence."""
    messages = [{"role": "system", "content": "Answer in French."}, *HELLO]
    with serving(pair_of(pool=pool_of(Listing()), system=policy)) as url:
        reply = post(url, {"model": MODEL, "messages": messages}).json()
        plain = ask(url).json()
    assert reply["choices"][0]["message"]["content"] == seen
    assert reply["prompt_r1"]["system_to"] == policy and "system_to" not in plain["prompt_r1"]


def test_a_server_that_refuses_system_messages_says_so():
    with serving(pair_of(system="refuse")) as url:
        refused = post(url, {"model": MODEL, "messages": [{"role": "developer", "content": "x"}, *HELLO]})
        assert refused.status_code == 400 and "--system" in refused.json()["error"]["message"]
        assert ask(url).status_code == 200


@pytest.mark.parametrize(
    ("stop", "text"), [("ANNA", "WHO IS "), (["?", "IS A"], "WHO "), ("x", "WHO IS ANNA?")]
)
def test_stop_cuts_the_answer(stop, text, url):
    with client_of(url) as client:
        reply = client.chat.completions.create(model=MODEL, messages=HELLO, stop=stop)
        chunks = client.chat.completions.create(model=MODEL, messages=HELLO, stop=stop, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert reply.choices[0].message.content == streamed == text


def test_openais_client_retrieves_the_model(url):
    with client_of(url) as client:
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError, match="there is no model 'a/b'"):
            client.models.retrieve("a/b")


BAD = [
    ({"model": "gpt-4"}, 404, "there is no model 'gpt-4'; this server has 'prompt-r1'"),
    ({"messages": [{"role": "user", "content": "long " * 5000}]}, 400, "tokens of a game of 4000"),
    ({"tools": [{"type": "function"}]}, 400, "`tools` is not supported"),
    ({"max_\ud800": 1}, 400, "there is no limit 'max_\\ud800'"),
]


@pytest.mark.parametrize(("fields", "status", "sentence"), BAD)
def test_a_request_that_cannot_be_answered_gets_one_sentence(fields, status, sentence, url):
    response = post(url, {"model": MODEL, "messages": HELLO, **fields})
    error = response.json()["error"]
    assert response.status_code == status and sentence in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_body_that_is_too_long_is_refused(url):
    assert post(url, b" " * 1_000_001).status_code == 400


@pytest.mark.parametrize(
    "sent", [b"\0\xffnoise\r\n\r\n", b"GET / HTTP/9.9 x\r\n\r\n", b"POST /v1\r\n: \r\n\r\n"]
)
def test_bytes_that_are_not_http_get_an_error_in_json(url, sent):
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=5) as connection:
        connection.sendall(sent)
        head, _, body = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and "HTTP" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/chat/completions", 405), ("POST", "/completions", 404), ("GET", "/other/" + "x" * 9000, 404)],
)
def test_an_unknown_path_or_method_is_an_error_in_json(url, method, path, status):
    response = httpx.request(method, url + path)
    error = response.json()["error"]
    assert response.status_code == status and error["type"] == "invalid_request_error"
    assert method in error["message"] and len(error["message"]) < 100


class Halved:
    async def ask(self, messages):
        return "\ud83d"


def test_half_a_character_in_a_question_becomes_a_question_mark(url):
    assert ask(url, "Who is \ud83d", seed="\ud83d").json()["choices"][0]["message"]["content"] == "WHO IS ?"
    with serving(pair_of(pool=pool_of(Halved()))) as other:
        message = ask(other, include_reasoning=True).json()["choices"][0]["message"]
    assert message["content"] == "?" and message["reasoning_content"].count("Environment: \ud83d") == 1


def test_the_name_of_an_unknown_model_is_cut(url):
    message = ask(url, model="x" * 900_000).json()["error"]["message"]
    assert message.endswith("xxx'; this server has 'prompt-r1'") and len(message) < 100


def test_a_request_with_two_lengths_is_answered_at_once(url):
    """Its body has no chunks: the server waited for the first one."""
    address = httpx.URL(url)
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {address.host}", "Content-Type: application/json"]
    lines += ["Content-Length: 2", "Transfer-Encoding: chunked", "", "{}"]
    with socket.create_connection((address.host, address.port), timeout=5) as connection:
        connection.sendall("\r\n".join(lines).encode())
        response = b""
        while b"}" not in response:
            response += connection.recv(10_000)
    assert response.startswith(b"HTTP/1.1 400") and b"send one of them" in response


def test_the_length_of_a_question_is_checked_on_its_beginning(monkeypatch):
    """900 kB of tags held the event loop for seconds."""
    codec, characters = EchoAgent().codec, []
    start = PieceEncoder.start
    monkeypatch.setattr(
        PieceEncoder, "start", lambda self, text: characters.append(len(text)) or start(self, text)
    )
    for length in (100_000, 900_000):
        with pytest.raises(QuestionTooLong, match="tokens of a game of 500"):
            question = Question("", "asked", "<think>" * (length // 7), ())
            check_question_lengths([question], codec, GameSettings(max_tokens=500))
    assert sum(characters) < 20_000


def test_a_web_page_of_another_site_cannot_ask(url):
    """Browsers send text/plain without asking first, and a site can point its name to this machine."""
    body = {"model": MODEL, "messages": HELLO}
    assert post(url, body, **{"Content-Type": "text/plain"}).status_code == 400
    refused = post(url, body, Host="evil.example")
    assert refused.status_code == 400 and "'evil.example'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *[("[::1]:8000", True), ("[::1]", True), ("LOCALHOST:1", True), ("127.0.0.1", True)],
        *[("[::2]:8000", False), ("localhost.evil.example", False), ("localhost:80:80", False), ("", False)],
    ],
)
def test_a_server_of_this_machine_answers_to_its_own_names_alone(host, known):
    app = make_app(pair_of(), hosts=("127.0.0.1", "localhost", "::1"))
    transport = httpx.ASGITransport(app)

    async def get() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/health", headers={"Host": host})).status_code

    assert asyncio.run(get()) == (200 if known else 400)


def test_a_body_that_does_not_come_is_refused(url, monkeypatch):
    monkeypatch.setattr("prompt_r1.serving.app.BODY_SECONDS", 0.2)

    def slowly() -> Iterator[bytes]:
        yield b"{"
        time.sleep(0.5)
        yield b"}"

    refused = post(url, slowly())
    assert refused.status_code == 400 and "did not come within 0.2 s" in refused.json()["error"]["message"]


def test_with_a_key_only_requests_that_have_it_are_answered():
    with serving(pair_of(key="secret")) as url:
        with client_of(url, key="secret") as client:
            assert client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content
        with client_of(url, key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(url, key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=MODEL, messages=HELLO)
        root = url.removesuffix("/v1")
        assert httpx.get(f"{root}/health").json() == {"status": "ok", "sessions": 0, "max_sessions": 64}
        assert "secret" not in httpx.get(root).text


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2_3", True), ("a b", False), ("x" * 65, False), ("é", False), ("", False)]
)
def test_each_response_has_the_id_of_its_request_or_a_new_one(url, sent, kept):
    headers = {"X-Request-Id": sent.encode()}
    for path in ("/models", "/nothing"):
        given = httpx.get(url + path, headers=headers).headers["X-Request-Id"]
        assert (given == sent) == kept and (kept or len(given) == 32)
    with client_of(url) as client:
        reply = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert reply.id == f"chatcmpl-{reply._request_id}"


def test_the_log_names_the_response_of_an_internal_error(caplog):
    with serving(pair_of(pool=pool_of(Failing(ZeroDivisionError("mine"))))) as url:
        number = ask(url).headers["X-Request-Id"]
    assert f"request {number} ended with an internal error" in caplog.text


def test_metrics_count_responses_games_and_what_the_environment_cost():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    with serving(pair_of(pool=paid_pool(), key="secret")) as url:
        page, key = url.removesuffix("/v1") + "/metrics", {"Authorization": "Bearer secret"}
        assert httpx.get(page).status_code == 401
        body = {"model": MODEL, "messages": [{"role": "user", "content": "2: Who?"}]}
        post(url, body, **key)
        post(url, body | {"max_calls": 1}, **key)
        response = httpx.get(page, headers=key)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert samples.pop(("prompt_r1_game_seconds_sum",)) > 0
    assert samples == {
        ("prompt_r1_responses_total", "401"): 1,
        ("prompt_r1_responses_total", "200"): 2,
        ("prompt_r1_games_total", "answered"): 1,
        ("prompt_r1_games_total", "max_turns"): 1,
        ("prompt_r1_running_games",): 0,
        ("prompt_r1_game_seconds_count",): 2,
        ("prompt_r1_environment_calls_total",): 3,
        ("prompt_r1_environment_tokens_in_total",): 30,
        ("prompt_r1_environment_tokens_out_total",): 30,
        ("prompt_r1_environment_usd_total",): pytest.approx(0.06),
    }


def test_metrics_without_their_package_say_what_is_missing(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "prompt_r1.serving.metrics", None)
    response = httpx.get(url.removesuffix("/v1") + "/metrics")
    assert response.status_code == 501 and "prometheus-client" in response.json()["error"]["message"]


# --- Limits and failures --------------------------------------------------------------------------


def test_a_full_server_answers_429_and_the_client_comes_back():
    agent = EchoAgent(seconds=0.2)

    async def ask_thrice(url: str) -> list[httpx.Response]:
        body = {"model": MODEL, "messages": HELLO}
        async with httpx.AsyncClient(timeout=30) as client:
            return await asyncio.gather(
                *(client.post(f"{url}/chat/completions", json=body) for _ in range(3))
            )

    with serving(pair_of(agent, max_sessions=2)) as url:
        responses = asyncio.run(ask_thrice(url))
        assert sorted(response.status_code for response in responses) == [200, 200, 429]
        [full] = [response for response in responses if response.status_code == 429]
        assert full.headers["Retry-After"] == "1" and full.json()["error"]["type"] == "server_full"
        assert ask(url).status_code == 200
    assert agent.peak == 2


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def ask(self, messages):
        raise self.error


FAILURES = [
    (EnvError("HTTP 500 from the model"), 502, "environment_error", "HTTP 500 from the model"),
    (FatalEnvError("HTTP 401: check OPENAI_API_KEY"), 502, "environment_unusable", "HTTP 401"),
    (ZeroDivisionError("mine"), 500, "internal_error", "the server's log has the traceback"),
]


@pytest.mark.parametrize(("error", "status", "kind", "sentence"), FAILURES)
def test_a_failed_environment_is_an_error_with_a_type_and_never_an_answer(error, status, kind, sentence):
    with serving(pair_of(pool=pool_of(Failing(error)))) as url:
        for fields in ({}, {"include_reasoning": True}):
            response = ask(url, **fields)
            assert response.status_code == status and response.json()["error"]["type"] == kind
            assert sentence in response.json()["error"]["message"]
        with client_of(url, max_retries=0) as client:
            stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            with pytest.raises(openai.APIError, match=sentence):
                for chunk in stream:
                    assert not chunk.choices[0].delta.content
        assert httpx.get(url.removesuffix("/v1") + "/health").json()["sessions"] == 0


@pytest.mark.parametrize(
    ("server", "fields", "calls"),
    [
        (Limits(), {}, 3),
        (Limits(turns=2), {}, 1),
        (Limits(calls=2), {}, 2),
        (Limits(), {"max_turns": 3}, 2),
        (Limits(), {"max_calls": 0}, 0),
        (Limits(), {"max_turns": 0}, 0),
        (Limits(calls=3), {"max_calls": 1}, 1),
    ],
)
def test_no_question_makes_more_calls_than_server_and_request_allow(server, fields, calls):
    with serving(pair_of(limits=server)) as url:
        reply = ask(url, "9: more than it may", **fields).json()
    assert reply["usage"]["environment"]["calls"] == calls
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["refusal"] == "The agent ended without an answer (max_turns)."


def test_limits_in_dollars_and_seconds_are_errors_that_the_client_does_not_repeat():
    pool = paid_pool(max_usd=0.1)
    with serving(pair_of(EchoAgent(seconds=0.02), pool, limits=Limits(usd=0.05))) as url:
        slow = ask(url, max_seconds=0.01)
        assert (slow.status_code, slow.json()["error"]["type"]) == (504, "time_limit")
        assert ask(url, "1: a").json()["usage"]["environment"]["usd"] == pytest.approx(0.02)
        dear = ask(url, "3: a")
        assert (dear.status_code, dear.json()["error"]["type"]) == (402, "budget_exhausted")
        statuses = [ask(url, "1: a").status_code for _ in range(3)]
        assert statuses == [200, 200, 402]  # the budget of the whole server
        for response in (slow, dear):
            assert response.headers["x-should-retry"] == "false"
    assert pool.budget.spent.usd <= 0.1


def test_a_client_that_leaves_before_its_stream_is_read_pays_for_nothing():
    """The iterator of events never ran, and the game was played to its end."""
    agent, pool = EchoAgent(seconds=0.05), paid_pool()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "3: Who?"}], "stream": True}
    received = [{"type": "http.request", "body": json.dumps(body).encode()}, {"type": "http.disconnect"}]
    headers = [(b"host", b"testserver"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {"query_string": b"", "asgi": {"spec_version": "2.3"}}

    async def receive():
        return received.pop(0)

    async def send(message):
        await asyncio.sleep(0)  # as for a full socket

    async def leave():
        await make_app(pair_of(agent, pool), hosts=("testserver",))(scope, receive, send)
        await asyncio.sleep(0.5)  # a game of the echoing agent takes less

    asyncio.run(leave())
    assert not received and agent.running == 0 and pool.budget.spent.calls == 0


def test_a_client_that_disconnects_ends_its_game_quietly(capfd):
    """The server logged a traceback for each of them."""
    agent = EchoAgent(seconds=30)
    with serving(pair_of(agent)) as url:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                body = {"model": MODEL, "messages": HELLO, "stream": stream}
                httpx.post(f"{url}/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.2))
            health = f"{url.removesuffix('/v1')}/health"
            deadline = time.monotonic() + 5
            while httpx.get(health).json()["sessions"]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    assert agent.running == 0 and capfd.readouterr().err == ""
