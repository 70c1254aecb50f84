"""The HTTP client against a local server that misbehaves in every way we know."""

import asyncio
import gzip
import json
import re
import time
from collections.abc import Mapping

import pytest

from prompt_r1.environments.sources import Outcome
from prompt_r1.errors import FatalEnvError, UsageError
from tests.support.mini_server import LocalServer, response_of, with_server
from tests.support.providers import (
    HELLO,
    KEY,
    RecordedAccount,
    body_of,
    endpoint,
    open_environment,
    outcome_of,
    reply,
)


class HostileServer(LocalServer):
    """Misbehaves in the way that the first part of the path names."""

    opened = requests = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        await super()._serve(reader, writer)

    async def respond(self, reader, writer, request: str, headers: Mapping[str, str], body: bytes) -> None:
        self.requests += 1
        self.headers, self.body = headers, body
        _, fault, *more = request.split("/")
        await getattr(self, fault)(writer, more[0])

    def url(self, fault: str) -> str:
        """The base URL of a fault."""
        return self.base_url.removesuffix("v1") + fault

    async def good(self, writer: asyncio.StreamWriter, way: str) -> None:
        writer.write(response_of(200, body_of()))

    async def drip(self, writer: asyncio.StreamWriter, way: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def hang(self, writer: asyncio.StreamWriter, way: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")

    async def encoded(self, writer: asyncio.StreamWriter, way: str) -> None:
        body, encoding = ENCODED[way]
        writer.write(response_of(200, body, f"Content-Encoding: {encoding}"))

    async def elsewhere(self, writer: asyncio.StreamWriter, way: str) -> None:
        writer.write(response_of(302, b"", f"Location: http://xn--/{KEY}"))

    async def zipped(self, writer: asyncio.StreamWriter, way: str) -> None:
        assert self.headers["accept-encoding"] == "gzip"  # and nothing that we may not read
        writer.write(response_of(200, gzip.compress(GOOD), f"Content-Encoding: {way}"))

    async def twice(self, writer: asyncio.StreamWriter, way: str) -> None:
        """Send each response a second time: with it, shortly after it, or half with it and half after it."""
        response = response_of(200, body_of(json.loads(self.body)["messages"][-1]["content"]))
        at_once = {"whole": len(response), "late": 0, "half": len(response) // 2}[way]
        writer.write(response + response[:at_once])
        await writer.drain()
        await asyncio.sleep(0.03)
        writer.write(response[at_once:])

    async def noise(self, writer: asyncio.StreamWriter, way: str) -> None:
        writer.write(b"\0\1\2 this is not HTTP\r\n\r\n")
        await writer.drain()
        raise ConnectionResetError


GOOD = json.dumps(body_of()).encode()
KEPT = ("good", "zipped", "encoded", "elsewhere")  # complete responses
GZIP_BOMB = gzip.compress(bytes(5_000_000))
ENCODED = {
    "bomb": (GZIP_BOMB, "gzip"),
    "twofold": (gzip.compress(GZIP_BOMB), "gzip, gzip"),
    "badzip": (b"not gzip", "gzip"),
}


def call_server(fault: str, **settings: object) -> tuple[Outcome, RecordedAccount]:
    """Call a server that has this fault; no connection but an idle one may stay open."""
    server, account = HostileServer(), RecordedAccount()

    async def one_call() -> Outcome:
        outcome = await outcome_of(endpoint(**{"base_url": server.url(fault), **settings}), account=account)
        async with asyncio.timeout(3):
            while len(server.open) > fault.startswith(KEPT):
                await asyncio.sleep(0.005)
        return outcome

    return with_server(one_call(), server), account


@pytest.mark.parametrize(
    ("fault", "timeout", "words"),
    [
        ("drip", 0.1, "no complete response within 0.1 s"),
        ("encoded/bomb", 9, "over 2,000,000 bytes"),
        ("encoded/twofold", 9, "encoded as 'gzip, gzip'"),  # took 51 s and 2.7 GB
        ("encoded/badzip", 9, "encoded as 'gzip'"),
        ("noise", 9, "in 6 requests, .*RemoteProtocolError.*; check http or https and the port"),
    ],
)
def test_a_hostile_server_fails_one_call_and_leaves_no_connection(fault, timeout, words) -> None:
    """Its requests may have been billed: they were delivered, and no reply was received."""
    started = time.perf_counter()
    outcome, account = call_server(fault, attempt_timeout=timeout, call_deadline=30)
    assert outcome.verdict == "failed" and re.search(words, outcome.reason), outcome
    assert 2 < account.lost == account.requests
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "identity, gzip", "utf-8", ""])
def test_a_compressed_reply_is_read_whatever_its_header_says(encoding: str) -> None:
    outcome, account = call_server(f"zipped/{encoding}")
    assert (outcome.verdict, outcome.text, account.lost) == ("ok", "Paris", 0)


def test_a_redirect_is_not_followed_and_named_without_the_key() -> None:
    """A bug: a target that is no URL made a call repeat its request for ten minutes."""
    outcome, account = call_server("elsewhere")
    assert outcome.verdict == "refused" and account.requests == 1
    assert outcome.reason == "HTTP 302 to http://xn--/[key] (check the base URL and any proxy)"


def test_all_calls_share_the_connections_of_one_client() -> None:
    """A bug: each attempt opened a new TCP and TLS connection."""
    server = HostileServer()

    async def calls() -> int:
        source = endpoint(base_url=server.url("good"), concurrency=4)
        for _ in range(5):
            await reply(source)
        opened = server.opened
        await asyncio.gather(*(reply(source) for _ in range(20)))
        return opened

    assert with_server(calls(), server) == 1 and server.opened <= 4


@pytest.mark.parametrize(("way", "pause"), [("whole", 0.0), ("whole", 0.1), ("half", 0.0), ("late", 0.1)])
def test_a_response_that_is_sent_twice_is_not_the_reply_to_the_next_call(way: str, pause: float) -> None:
    """A bug: on a kept connection the second copy was taken as the reply to another question."""
    server = HostileServer()

    async def five_calls() -> list[bool]:
        source, own = endpoint(base_url=server.url(f"twice/{way}")), []
        for number in range(5):
            said = await reply(source, [{"role": "user", "content": f"question {number}"}])
            own.append(said == f"question {number}")
            await asyncio.sleep(pause)
        return own

    assert all(with_server(five_calls(), server))


@pytest.mark.parametrize("port", [9, 65536])  # that one raises what a proxy's port too high does
def test_requests_that_did_not_reach_the_server_are_not_charged(port: int) -> None:
    outcome, account = call_server("good", base_url=f"http://127.0.0.1:{port}")
    assert (outcome.verdict, account.lost) == ("failed", 0) and "no server answers" in outcome.reason


def test_a_request_that_the_deadline_of_its_call_ends_is_charged() -> None:
    outcome, account = call_server("hang", attempt_timeout=9, call_deadline=0.2)
    assert (outcome.verdict, account.lost) == ("failed", 1)


def test_a_cancelled_call_closes_its_connection_and_releases_its_slot() -> None:
    server = HostileServer()

    async def cancel_twice() -> None:
        environment = endpoint(base_url=server.url("hang"), concurrency=1)
        for number in (1, 2):  # the second one hangs at the server too, not in waiting for the slot
            call = asyncio.create_task(reply(environment))
            async with asyncio.timeout(5):
                while server.requests < number:
                    await asyncio.sleep(0.005)
                call.cancel()
                while server.open:
                    await asyncio.sleep(0.005)

    with_server(cancel_twice(), server)


def test_a_local_endpoint_is_called_without_key_and_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = HostileServer()

    async def one_call() -> str:
        return await open_environment(f"large@{server.url('good')}").ask(HELLO)

    assert with_server(one_call(), server) == "Paris"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NO_PROXY", "localhost,[::1]"),
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("https_proxy", "ftp://proxy"),
        ("HTTP_PROXY", "http://user:hunter2secret#@127.0.0.1:3128"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem"),
        ("SSLKEYLOGFILE", "/nowhere/keys"),
    ],
)
def test_a_variable_that_breaks_the_client_is_named_in_one_sentence(name, value, monkeypatch) -> None:
    """A bug: "internal error, this is a bug". A local endpoint reads none of them without TLS."""
    for other in ("NO_PROXY", "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.lower(), raising=False)
    monkeypatch.setenv(name, value)
    for work in ("check", "ask"):
        asked = open_environment("large@https://llm.test/v1")
        sentence = rf"the environment variable {name} cannot be used for https://llm.test/v1: .*; correct or"
        with pytest.raises(UsageError, match=sentence) as caught:
            asyncio.run(asked.check() if work == "check" else asked.ask(HELLO))
        assert "hunter2" not in str(caught.value)


def test_a_local_endpoint_over_tls_reads_the_certificate_variables_and_no_proxy(monkeypatch) -> None:
    """A bug: SSL_CERT_FILE was ignored for https://localhost, though the error said to set it."""
    monkeypatch.setenv("HTTPS_PROXY", "ftp://proxy")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    with pytest.raises(UsageError, match=r"SSL_CERT_FILE cannot be used for https://127.0.0.1:9/v1"):
        asyncio.run(open_environment("large@https://127.0.0.1:9/v1").check())
    with pytest.raises(FatalEnvError, match=r"no server answers .*: check the host and the port$"):
        asyncio.run(open_environment("large@http://127.0.0.1:9/v1").check())


def test_a_server_that_cannot_be_reached_may_be_behind_a_wrong_proxy(monkeypatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hunter2secret@127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(FatalEnvError, match=r"the port, and .*HTTPS_PROXY"):
        asyncio.run(open_environment("large@https://llm.test/v1").check())
