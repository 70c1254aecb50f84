"""An OpenAI-compatible endpoint as a source: `--env MODEL@URL`, over one shared HTTP client.

`Endpoint.attempt` sends one request; responses.py reads the response. time_limit.py limits its time.
The read timeout of httpx is not enough, because it starts again with every chunk: a server that sends a blank
line now and then would keep a request open forever.
"""

import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import replace

import httpx

from prompt_r1.environments.responses import read_reply
from prompt_r1.environments.sources import (
    Busy,
    Caller,
    NoServer,
    NoText,
    Refused,
    Reply,
    Source,
    byte_count,
    limit_in,
    with_system,
)
from prompt_r1.errors import FatalEnvError, UsageError
from prompt_r1.programs.text import without_keys
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
CONNECT_SECONDS = 30.0
MAX_BYTES = 2_000_000  # the largest response; more than most models can write
MAX_PORT = 65535
# A model's name has no blank ("gpt 4") and no URL ("http://host/v1"). What follows an @ must not look like a
# host ("m@localhost:8000", "m@10.0.0.1"): such a name is a MODEL@URL without http://. Any other @ may be part
# of a name ("m@latest").
NOT_IN_A_NAME = re.compile(r"\s|://|@(localhost|[^@]*[.:])")


class Endpoint(Source):
    """A source that asks the model `name` at `base_url`.

    `system` opens every dialogue that has no system message. `fields` (temperature, max_tokens, …) are added
    to every request; a field that the server does not know is left out for the rest of the run.
    """

    timeout = 120.0
    needs_check = True

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        key: str,
        fields: Mapping[str, object],
        system: str,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = name
        self.base_url = base_url
        self.key = key
        self.fields = dict(fields)
        self.system = system
        self.reply_limit = limit_in(self.fields)
        # A server on this machine is slow only because of load, which more requests increase.
        self.resends_slow = not is_loopback(base_url)
        self.parameters = {"url": base_url, "system": system, **self.fields}
        # At temperature 0, equal calls share one reply. They do so even if the server rejects this field and
        # samples, because the keys of the journal must not change.
        self.samples = self.fields.get("temperature") != 0
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.base_url}"

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        """Send a request. If the server rejects a field of it, send it again at once without this field."""
        messages = with_system(messages, self.system)
        while True:
            fields = self.fields
            try:
                reply = await self._send({"model": self.name, "messages": messages, **fields})
            except Refused as refused:
                # Without max_completion_tokens, a reply might cost more than was reserved for it.
                if refused.field not in fields or refused.field == "max_completion_tokens":
                    raise
                self._leave_out(refused.field, refused.reason)
            else:
                return _with_tokens(reply, messages)

    async def _send(self, request: Mapping[str, object]) -> Reply:
        """Send a request and read its response. Raises Busy and Refused."""
        if self._client is None:
            self._client = self._open_client()
        url = self.base_url + "/chat/completions"
        sending = self._client.stream("POST", url, content=json.dumps(request))
        body = bytearray()
        try:
            async with sending as response:
                # The raw body is not decompressed, because a few kilobytes may stand for gigabytes.
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise NoText(f"a response of over {MAX_BYTES:,} bytes")
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            said = str(error) or type(error).__name__
            advice = "check the URL, and HTTPS_PROXY if it is set"
            raise NoServer(f"no server answers ({said}): {advice}") from None
        except (httpx.HTTPError, OSError) as error:
            raise Busy(f"{type(error).__name__}: {error}".rstrip(":. "), may_be_billed=True) from None
        if encoding := response.headers.get("content-encoding"):
            raise NoText(f"the response is encoded ({encoding[:40]}), though the request allows no encoding")
        # Some servers send the key back. Bytes that are not UTF-8 stay as they are.
        text = without_keys(body.decode(errors="surrogateescape"))
        body_without_keys = text.encode(errors="surrogateescape")
        return read_reply(response.status_code, response.headers, body_without_keys, now=time.time())

    def _leave_out(self, field: str, reason: str) -> None:
        """Send no request with this field any more. `max_tokens` becomes `max_completion_tokens`."""
        if field not in self.fields:  # Another call has left it out meanwhile.
            return
        logger.warning("%s does not accept %s; continuing without: %s", self.name, field, reason)
        fields = dict(self.fields)
        value = fields.pop(field)
        if field == "max_tokens":
            fields.setdefault("max_completion_tokens", value)
        self.fields = fields

    def check_listening(self) -> None:
        """Raise FatalEnvError if the server is on this machine, and nothing listens at its port.

        The first request would find this, too, but only after torch has been imported.
        """
        if not is_loopback(self.base_url):
            return
        url = httpx.URL(self.base_url)
        default_port = 443 if url.scheme == "https" else 80
        try:
            socket.create_connection((url.host, url.port or default_port), timeout=1).close()
        except ConnectionRefusedError:
            raise FatalEnvError(f"{self}: no server answers there: start it, or correct the port") from None
        except OSError:
            return  # The first request will tell.

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _open_client(self) -> httpx.AsyncClient:
        # At INFO, httpx and httpcore log the server's status line. Its reason may contain the key.
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            return httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(),  # There are none, because Environment limits the calls.
                transport=self._transport,
                trust_env=not is_loopback(self.base_url),  # A proxy cannot reach the ports of this machine.
            )
        except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
            # The message of the error is not shown, because it may quote the password of a proxy.
            problem = f"{self.base_url} cannot be asked ({type(error).__name__})"
            variables = "ALL_PROXY, NO_PROXY, … (SOCKS needs `pip install httpx[socks]`) and SSL_CERT_FILE"
            raise UsageError(f"{problem}: correct or unset the variables {variables}") from None


def _with_tokens(reply: Reply, messages: list[Message]) -> Reply:
    """The reply with the tokens that it costs. If the server counts none, a bound is charged."""
    if reply.reason:  # The server rejected the request, which costs nothing.
        return reply
    sent = sum(byte_count(message["content"]) for message in messages)
    written = byte_count(reply.text) + byte_count(reply.reasoning)
    return replace(reply, tokens_in=reply.tokens_in or sent, tokens_out=reply.tokens_out or written)


def endpoint_of(name: str, *, key: str, fields: Mapping[str, object], system: str) -> Endpoint:
    """The endpoint of a SPEC: MODEL@URL, or MODEL at OPENAI_BASE_URL (default: OpenAI).

    Raises UsageError for a malformed name or URL, and for a key that is missing or that an HTTP header cannot
    hold (the error of httpx would show the key).
    """
    model, at, rest = name.rpartition("@http")  # The name of a model may contain an @ too.
    if at:
        given = f"http{rest}"
    else:
        model, given = name, ""
    if not model or NOT_IN_A_NAME.search(model):
        raise UsageError(
            f"there is no environment {name!r}: give mini, MODEL, MODEL@http://host:port/v1 or hf:DIR "
            "(a URL begins with http:// or https://)"
        )
    key = key.strip()
    base_url = _base_url(given or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    if not key and not given and not is_loopback(base_url):
        raise UsageError(
            f"the environment {name!r} at {base_url} needs a key: set OPENAI_API_KEY, or give --env mini "
            "or MODEL@http://host:port/v1"
        )
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise UsageError(
            "OPENAI_API_KEY contains a line break, a blank or a non-ASCII character: copy it again"
        )
    return Endpoint(model, base_url, key=key, fields=fields, system=system)


def _base_url(text: str) -> str:
    """The base URL of an endpoint, in normal form. Raises UsageError, which does not show the URL."""
    wrong = UsageError(
        "the base URL of an endpoint must look like http://host:port/v1 "
        f"(without user, password or query; port at most {MAX_PORT}; a key goes to OPENAI_API_KEY)"
    )
    try:
        url = httpx.URL(text.strip())
        has_host = bool(url.host)  # `host` raises ValueError for a malformed xn--… name.
    except (httpx.InvalidURL, ValueError):
        raise wrong from None
    is_http = url.scheme in ("http", "https")
    has_more = bool(url.userinfo or url.query or url.fragment)
    if not is_http or not has_host or has_more or (url.port or 0) > MAX_PORT:
        raise wrong
    return str(url).rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Return whether the endpoint is on this machine."""
    return bool(re.fullmatch(r"(.+\.)?localhost|127(\.\d+){3}|::1", httpx.URL(base_url).host))
