"""The HTTP client against a local server that misbehaves in every way we know."""

import asyncio
import gzip
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prompt_r1.endpoint.responses import Outcome, reply_of
from prompt_r1.errors import EnvError
from tests.support.providers import HELLO, KEY, body_of, chat, error_of, open_environment, reply


class HostileServer:
    """Misbehaves in the way that the first part of the path names."""

    def __init__(self) -> None:
        self.open = 0  # connections
        self.requests = 0
        self.base_url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["HostileServer"]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
            async with asyncio.timeout(3):  # in every test, no connection may stay open
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
                self.requests += 1
                fault = head.split("/")[1]
                if fault in COMPLETE_RESPONSES:
                    self.respond(writer, *COMPLETE_RESPONSES[fault])
                else:
                    await getattr(self, fault)(writer, head)
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

    async def twofold(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "200 OK", gzip.compress(GZIP_BOMB), "Content-Encoding: gzip, gzip")

    async def elsewhere(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "302 Found", b"", "Location: http://xn--/")

    async def badzip(self, writer: asyncio.StreamWriter, head: str) -> None:
        self.respond(writer, "200 OK", b"not gzip", "Content-Encoding: gzip")

    async def twice(self, writer: asyncio.StreamWriter, head: str) -> None:
        """Send each response a second time: with it, shortly after it, or half with it and half after it."""
        body = json.dumps(body_of(f"reply {self.requests}")).encode()
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
# Complete responses, by the name of the fault.
COMPLETE_RESPONSES: dict[str, tuple[str, bytes]] = {
    "5xx": ("503 Unavailable", b"try later"),
    "storm": ("429 Too Many Requests", b"{}"),
    "error200": ("200 OK", json.dumps(error_of("upstream is down", code=502)).encode()),
    "nochoices": ("200 OK", b'{"choices": []}'),
    "null": ("200 OK", json.dumps(body_of(None)).encode()),
    "html": ("200 OK", b"<html>Bad gateway</html>"),
    "cutjson": ("200 OK", GOOD[:-9]),
    "fat": ("200 OK", b" " * 50_000_000),
    "nul": ("200 OK", json.dumps(body_of("Pa\0ris")).encode()),
    "surrogate": ("200 OK", json.dumps(body_of("Paris\ud800")).encode()),
    "filter": ("200 OK", json.dumps(body_of("", finish="content_filter")).encode()),
    "toolong": ("400 Bad Request", json.dumps(error_of("prompt is too long")).encode()),
}
GZIP_BOMB = gzip.compress(bytes(50_000_000), compresslevel=6)


def call_server(fault: str, **settings: object) -> Outcome:
    """Call a server that has this fault once, and check that no connection stays open."""

    async def one_call() -> Outcome:
        async with HostileServer().running() as server:
            defaults = {"base_url": f"{server.base_url}/{fault}", "max_attempts": 2}
            return await chat(**{**defaults, **settings}).call(HELLO)

    return asyncio.run(one_call())


@pytest.mark.parametrize(
    ("fault", "timeout", "words", "lost"),
    [
        ("drip", 0.5, "no complete response within 0.5 s", 2),
        ("hang", 0.5, "no complete response within 0.5 s", 2),
        ("reset", 9, "ReadError|RemoteProtocolError", 2),
        ("bomb", 9, "over 10,000,000 bytes", 2),
        ("twofold", 9, "encoded as 'gzip, gzip'", 2),  # took 51 s and 2.7 GB
        ("badzip", 9, "not gzip", 2),
        ("elsewhere", 9, "InvalidURL|IDNA|UnsupportedProtocol|HTTP 302", 2),
        ("noise", 9, "RemoteProtocolError", 2),
        ("5xx", 9, "HTTP 503", 0),
        ("storm", 9, "HTTP 429", 0),
        ("error200", 9, "upstream is down", 0),
        ("nochoices", 9, "no choices", 2),
        ("null", 9, "an empty reply", 2),
        ("html", 9, "not a JSON object", 2),
        ("cutjson", 9, "not a JSON object", 2),
        ("fat", 9, "over 10,000,000 bytes", 2),
    ],
)
def test_a_hostile_server_fails_one_call_and_leaves_no_connection(fault, timeout, words, lost) -> None:
    """Attempts may have been billed (`lost`) if their request was delivered and no reply was received."""
    started = time.perf_counter()
    outcome = call_server(fault, attempt_timeout=timeout)
    assert outcome.verdict == "retry" and re.search(words, outcome.reason)
    assert outcome.lost == lost and time.perf_counter() - started < 8


@pytest.mark.parametrize(
    ("fault", "text"),
    [("good", "Paris"), ("nul", "Paris"), ("surrogate", "Paris?"), ("filter", ""), ("toolong", "")],
)
def test_an_unusual_reply_is_accepted(fault: str, text: str) -> None:
    outcome = call_server(fault)
    assert (reply_of(outcome, "large"), outcome.lost) == (text, 0)


def test_a_call_that_hangs_does_not_block_other_calls() -> None:
    async def both() -> None:
        async with HostileServer().running() as server:
            bad = chat(base_url=f"{server.base_url}/hang", attempt_timeout=2, max_attempts=1)
            good = chat(base_url=f"{server.base_url}/good")
            waiting = asyncio.create_task(reply(bad))
            assert await asyncio.gather(*(reply(good) for _ in range(50))) == ["Paris"] * 50
            assert not waiting.done()
            with pytest.raises(EnvError):
                await waiting

    asyncio.run(both())


@pytest.mark.parametrize("way", ["whole", "late", "half"])
@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_response_that_is_sent_twice_is_not_the_reply_to_the_next_call(way: str, pause: float) -> None:
    """A bug: on a kept connection the second copy was taken as the reply to another question."""

    async def five_calls() -> list[str]:
        async with HostileServer().running() as server:
            environment = chat(base_url=f"{server.base_url}/twice/{way}")
            replies = []
            for _ in range(5):
                replies.append(await reply(environment))
                await asyncio.sleep(pause)
            return replies

    assert asyncio.run(five_calls()) == [f"reply {number}" for number in range(1, 6)]


def test_attempts_that_did_not_reach_the_server_are_not_counted() -> None:
    outcome = call_server("good", base_url="http://127.0.0.1:9")
    assert (outcome.verdict, outcome.lost) == ("retry", 0) and "ConnectError" in outcome.reason


def test_an_attempt_that_the_deadline_of_its_call_ends_is_counted() -> None:
    outcome = call_server("hang", attempt_timeout=9, call_deadline=1)
    assert (outcome.verdict, outcome.lost) == ("retry", 1)


def test_an_echoed_authorization_header_is_scrubbed() -> None:
    outcome = call_server("echo")
    assert (outcome.verdict, outcome.lost) == ("fatal", 0)
    assert "uthorization: Bearer [key]" in outcome.reason and KEY not in outcome.reason


def test_a_cancelled_call_closes_its_connection_and_releases_its_slot() -> None:
    async def cancel_twice() -> None:
        async with HostileServer().running() as server:
            environment = chat(base_url=f"{server.base_url}/hang", concurrency=1)
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
            environment = open_environment(f"large@{server.base_url}/good", env_timeout=1)
            return await environment.ask(HELLO)

    assert asyncio.run(one_call()) == "Paris"
