"""The HTTP client against a local server that misbehaves in every way we know."""

import asyncio
import gzip
import re
from collections.abc import Mapping

import pytest

from prompt_r1.environments.check import check_servers
from prompt_r1.environments.endpoint import Endpoint
from prompt_r1.environments.sources import Busy, NoServer, Refused, Reply
from prompt_r1.errors import FatalEnvError, UsageError
from tests.support.mini_server import LocalServer, response_of, with_server
from tests.support.providers import (
    HELLO,
    KEY,
    attempt,
    body_of,
    endpoint,
    environment_over,
    open_environment,
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

    async def together(self, writer: asyncio.StreamWriter, way: str) -> None:
        """Reply when so many requests are there. No response frees a connection for the others."""
        while self.requests % int(way):
            await asyncio.sleep(0.005)
        await self.good(writer, way)

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
        writer.write(response_of(302, b"", f"Location: {self.base_url}/good/{KEY}"))

    async def large(self, writer: asyncio.StreamWriter, way: str) -> None:
        writer.write(response_of(200, bytes(5_000_000)))

    async def noise(self, writer: asyncio.StreamWriter, way: str) -> None:
        writer.write(b"\0\1\2 this is not HTTP\r\n\r\n")
        await writer.drain()
        raise ConnectionResetError


GZIP_BOMB = gzip.compress(bytes(5_000_000))
ENCODED = {"bomb": (GZIP_BOMB, "gzip"), "twofold": (gzip.compress(GZIP_BOMB), "gzip, gzip")}
KEPT = ("good", "encoded", "elsewhere")  # complete responses


def attempt_at(fault: str, **settings: object) -> Reply | Busy | Refused:
    """What a request to a server with this fault comes to; no connection but an idle one may stay open."""
    server = HostileServer()

    async def one_attempt() -> Reply | Busy | Refused:
        source = endpoint(**{"base_url": server.url(fault), **settings})
        try:
            came: Reply | Busy | Refused = await attempt(source)
        except (Busy, Refused) as problem:
            came = problem
        async with asyncio.timeout(3):
            while len(server.open) > fault.startswith(KEPT):
                await asyncio.sleep(0.005)
            await source.close()
            while server.open:
                await asyncio.sleep(0.005)
        return came

    return with_server(one_attempt(), server)


@pytest.mark.parametrize("fault", ["drip", "hang"])
def test_a_response_that_does_not_end_is_given_up_and_leaves_no_connection(fault: str, monkeypatch) -> None:
    monkeypatch.setattr(Endpoint, "timeout", 0.3)
    came = attempt_at(fault)
    assert isinstance(came, Busy) and came.may_be_billed
    assert came.reason == "no complete response within 0.3 s"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("large", "over 2,000,000 bytes"),
        ("encoded/bomb", "encoded (gzip), though"),
        ("encoded/twofold", "encoded (gzip, gzip), though"),  # took 51 s and 2.7 GB
        ("noise", "RemoteProtocolError"),
    ],
)
def test_a_hostile_server_fails_one_attempt_and_leaves_no_connection(fault: str, words: str) -> None:
    """The request may have been billed: it was delivered, and no reply was received."""
    came = attempt_at(fault)
    assert isinstance(came, Busy) and came.may_be_billed and words in came.reason


def test_a_redirect_is_not_followed_and_named_without_the_key(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    came = attempt_at("elsewhere")
    assert isinstance(came, Refused)
    assert re.fullmatch(r"HTTP 302 to http://127\.0\.0\.1:\d+/v1/good/\[key\]", came.reason)


def test_an_encoded_response_is_not_asked_for() -> None:
    server = HostileServer()

    async def one_attempt() -> None:
        source = endpoint(base_url=server.url("good"))
        await attempt(source)
        await source.close()

    with_server(one_attempt(), server)
    assert server.headers["accept-encoding"] == "identity"


def test_all_calls_share_the_connections_of_one_client() -> None:
    """A bug: each attempt opened a new TCP and TLS connection."""
    server = HostileServer()

    async def calls() -> int:
        asked = environment_over(base_url=server.url("good"), concurrency=4)
        for _ in range(5):
            await reply(asked)
        opened = server.opened
        await asyncio.gather(*(reply(asked) for _ in range(20)))
        await asked.close()
        return opened

    assert with_server(calls(), server) == 1 and server.opened <= 4


def test_the_connections_of_all_concurrent_calls_are_kept_for_the_next_step() -> None:
    """By default, httpx keeps 20, so with more games at once most steps would open the others anew."""
    server = HostileServer()
    games = 30

    async def two_steps() -> None:
        asked = environment_over(base_url=server.url(f"together/{games}"), concurrency=games)
        for _ in range(2):
            await asyncio.gather(*(reply(asked) for _ in range(games)))
        await asked.close()

    with_server(two_steps(), server)
    assert server.requests == 2 * games and server.opened == games


def test_a_request_that_does_not_reach_the_server_cannot_be_billed() -> None:
    came = attempt_at("good", base_url="http://127.0.0.1:9")
    assert isinstance(came, NoServer) and not came.may_be_billed and "no server answers" in came.reason


def test_a_cancelled_call_closes_its_connection_and_releases_its_slot() -> None:
    server = HostileServer()

    async def cancel_twice() -> None:
        environment = environment_over(base_url=server.url("hang"), concurrency=1)
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
        asked = open_environment(f"large@{server.url('good')}")
        try:
            return (await asked.ask(HELLO)).text
        finally:
            await asked.close()

    assert with_server(one_call(), server) == "Paris"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NO_PROXY", "localhost,[::1]"),
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("https_proxy", "ftp://proxy"),
        ("HTTP_PROXY", "http://user:hunter2secret#@127.0.0.1:3128"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem"),
    ],
)
def test_a_variable_that_breaks_the_client_is_explained_in_one_sentence(name, value, monkeypatch) -> None:
    """A bug: "internal error, this is a bug". A local endpoint reads none of them without TLS."""
    for other in ("NO_PROXY", "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.lower(), raising=False)
    monkeypatch.setenv(name, value)
    for work in ("check", "ask"):
        asked = open_environment("large@https://llm.test/v1")
        sentence = "https://llm.test/v1 cannot be asked .*: correct or unset the variables ALL_PROXY"
        with pytest.raises(UsageError, match=sentence) as caught:
            asyncio.run(check_servers(asked) if work == "check" else asked.ask(HELLO))
        assert "hunter2" not in str(caught.value)


def test_a_server_that_cannot_be_reached_may_be_behind_a_wrong_proxy(monkeypatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hunter2secret@127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(FatalEnvError, match=r"check the URL, and HTTPS_PROXY") as caught:
        asyncio.run(check_servers(open_environment("large@https://llm.test/v1")))
    assert "hunter2" not in str(caught.value)
