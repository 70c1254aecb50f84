"""The HTTP client against a local server that misbehaves in every way we know."""

import asyncio
import gzip
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prompt_r1.environments.sources import Outcome
from prompt_r1.errors import UsageError
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


class HostileServer:
    """Misbehaves in the way that the first part of the path names."""

    def __init__(self) -> None:
        self.open = self.opened = 0  # connections
        self.requests = 0
        self.base_url, self.body = "", b""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["HostileServer"]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.opened += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.lower().split("content-length:")[1].split()[0])
                self.body = await reader.readexactly(length)
                self.requests += 1
                fault = head.split("/")[1]
                await getattr(self, fault)(writer, head)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.close()

    def respond(self, writer: asyncio.StreamWriter, status: str, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)

    async def good(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "200 OK", json.dumps(body_of()).encode())

    async def drip(self, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def hang(self, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")

    async def encoded(self, writer: asyncio.StreamWriter, head: str) -> None:
        body, encoding = ENCODED[head.split("/")[2]]
        self.respond(writer, "200 OK", body, f"Content-Encoding: {encoding}")

    async def elsewhere(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "302 Found", b"", f"Location: http://xn--/{KEY}")

    async def zipped(self, writer: asyncio.StreamWriter, head: str) -> None:
        assert "accept-encoding: gzip\r\n" in head.lower()  # and nothing that we may not read
        self.respond(writer, "200 OK", gzip.compress(GOOD), f"Content-Encoding: {head.split('/')[2]}")

    async def twice(self, writer: asyncio.StreamWriter, head: str) -> None:
        """Send each response a second time: with it, shortly after it, or half with it and half after it."""
        body = json.dumps(body_of(json.loads(self.body)["messages"][-1]["content"])).encode()
        response = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        at_once = {"whole": len(response), "late": 0, "half": len(response) // 2}[head.split("/")[2]]
        writer.write(response + response[:at_once])
        await writer.drain()
        await asyncio.sleep(0.03)
        writer.write(response[at_once:])

    async def noise(self, writer: asyncio.StreamWriter, head: str) -> None:
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

    async def one_call() -> tuple[Outcome, RecordedAccount]:
        async with HostileServer().running() as server:
            account = RecordedAccount()
            given = {"base_url": f"{server.base_url}/{fault}", **settings}
            outcome = await outcome_of(endpoint(**given), account=account)
            async with asyncio.timeout(3):
                while server.open > fault.startswith(KEPT):
                    await asyncio.sleep(0.005)
            return outcome, account

    return asyncio.run(one_call())


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
    assert outcome.reason == "HTTP 302 to http://xn--/[key] (check the base URL)"


def test_all_calls_share_the_connections_of_one_client() -> None:
    """A bug: each attempt opened a new TCP and TLS connection."""

    async def calls() -> tuple[int, int]:
        async with HostileServer().running() as server:
            source = endpoint(base_url=f"{server.base_url}/good", concurrency=4)
            for _ in range(5):
                await reply(source)
            opened = server.opened
            await asyncio.gather(*(reply(source) for _ in range(20)))
            return opened, server.opened

    alone, together = asyncio.run(calls())
    assert alone == 1 and together <= 4


@pytest.mark.parametrize(("way", "pause"), [("whole", 0.0), ("whole", 0.1), ("half", 0.0), ("late", 0.1)])
def test_a_response_that_is_sent_twice_is_not_the_reply_to_the_next_call(way: str, pause: float) -> None:
    """A bug: on a kept connection the second copy was taken as the reply to another question."""

    async def five_calls() -> list[bool]:
        async with HostileServer().running() as server:
            source = endpoint(base_url=f"{server.base_url}/twice/{way}")
            own = []
            for number in range(5):
                said = await reply(source, [{"role": "user", "content": f"question {number}"}])
                own.append(said == f"question {number}")
                await asyncio.sleep(pause)
            return own

    assert all(asyncio.run(five_calls()))


@pytest.mark.parametrize("port", [9, 65536])  # that one raises what a proxy's port too high does
def test_requests_that_did_not_reach_the_server_are_not_charged(port: int) -> None:
    outcome, account = call_server("good", base_url=f"http://127.0.0.1:{port}")
    assert (outcome.verdict, account.lost) == ("failed", 0) and "no server answers" in outcome.reason


def test_a_request_that_the_deadline_of_its_call_ends_is_charged() -> None:
    outcome, account = call_server("hang", attempt_timeout=9, call_deadline=0.2)
    assert (outcome.verdict, account.lost) == ("failed", 1)


def test_a_cancelled_call_closes_its_connection_and_releases_its_slot() -> None:
    async def cancel_twice() -> None:
        async with HostileServer().running() as server:
            environment = endpoint(base_url=f"{server.base_url}/hang", concurrency=1)
            for number in (1, 2):  # the second one hangs at the server too, not in waiting for the slot
                call = asyncio.create_task(reply(environment))
                async with asyncio.timeout(5):
                    while server.requests < number:
                        await asyncio.sleep(0.005)
                    call.cancel()
                    while server.open:
                        await asyncio.sleep(0.005)

    asyncio.run(cancel_twice())


def test_a_local_endpoint_is_called_without_key_and_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def one_call() -> str:
        async with HostileServer().running() as server:
            environment = open_environment(f"large@{server.base_url}/good")
            return await environment.ask(HELLO)

    assert asyncio.run(one_call()) == "Paris"


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
    """A bug: "internal error, this is a bug". A local endpoint reads none of them."""
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
