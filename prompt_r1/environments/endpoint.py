"""An OpenAI-compatible endpoint as a source: `--env MODEL@URL`, over one shared HTTP client.

`Endpoint.attempt` sends one request; responses.py reads the response. A request has a deadline of its own,
because httpx's read timeout starts again with every chunk: a server that sends a blank line now and then
would keep a request open forever.
"""

import asyncio
import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

import httpx

from prompt_r1.environments.environment import BILLED_CHARACTERS_PER_TOKEN
from prompt_r1.environments.responses import read_reply
from prompt_r1.environments.sources import Busy, Caller, NoServer, NoText, Refused, Reply, Source
from prompt_r1.errors import UsageError
from prompt_r1.programs.keys import SHORTEST_SECRET, scrub
from prompt_r1.programs.text import printable
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
CONNECT_SECONDS = 30.0
MOST_BYTES = 2_000_000  # of a response: more than most models can write
LONGEST_REASON = 300  # characters of a provider's error message
HIGHEST_PORT = 65535
CLIENT_VARIABLES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


@dataclass(repr=False, eq=False)
class Endpoint(Source):
    """Asks the model `name` at `base_url`. `system` opens every dialogue that has no system message.

    `fields` (temperature, max_tokens, …) are added to every request; a field that the server does not know is
    dropped for the rest of the run. `timeout` bounds a request and its response, in seconds.
    """

    name: str
    base_url: str
    _: KW_ONLY
    key: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    system: str = ""
    concurrency: int = 64
    timeout: float = 120.0
    transport: httpx.AsyncBaseTransport | None = None
    needs_check: bool = True

    def __post_init__(self) -> None:
        self.parameters: Mapping[str, object] = {"url": self.base_url, "system": self.system, **self.fields}
        self.samples = self.fields.get("temperature") != 0
        self._client: httpx.AsyncClient | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.base_url}"

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        """Send one request. No text that comes of it contains the key, which some servers send back."""
        if self.system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        fields = self.fields  # another call may drop one while this one waits
        try:
            reply = await self._send({"model": self.name, "messages": messages, **fields})
        except Refused as refused:
            refused.reason = self._shown(refused.reason)
            if refused.field not in fields:
                raise
            self._drop_field(refused.field, refused.reason)
            raise Busy(f"{self.name} does not accept {refused.field}", wait=0.0) from None
        except Busy as busy:
            busy.reason = self._shown(busy.reason)
            raise
        secret = self.key if len(self.key) >= SHORTEST_SECRET else ""
        reply = replace(
            reply,
            text=scrub(reply.text, secret),
            reasoning=scrub(reply.reasoning, secret),
            finish=scrub(reply.finish, secret),
            reason=self._shown(reply.reason),
        )
        if reply.reason:
            return reply  # the request was rejected, and costs nothing
        # Without counts, a reply would be free.
        sent = sum(len(message["content"]) for message in messages)
        written = len(reply.text) + len(reply.reasoning)
        return replace(
            reply,
            tokens_in=reply.tokens_in or -(-sent // BILLED_CHARACTERS_PER_TOKEN),
            tokens_out=reply.tokens_out or -(-written // BILLED_CHARACTERS_PER_TOKEN),
        )

    async def _send(self, request: Mapping[str, object]) -> Reply:
        """One request and its response. Raises Busy and Refused."""
        client = self._client = self._client or self._open_client()
        content = json.dumps(request)  # ASCII: a lone surrogate could not be encoded
        url, body = self.base_url + "/chat/completions", bytearray()
        try:
            async with asyncio.timeout(self.timeout), client.stream("POST", url, content=content) as response:
                # Not decompressed: a few kilobytes may stand for gigabytes.
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        raise NoText(f"a response of over {MOST_BYTES:,} bytes")
        except TimeoutError:
            reason = f"no complete response within {self.timeout:g} s"
            raise Busy(reason, may_be_billed=True) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, ExceptionGroup) as error:
            # asyncio's errors are a group where a proxy's port is above the highest one.
            said = str(error) or type(error).__name__
            raise NoServer(f"no server answers ({said}): check the URL{_proxy_advice()}") from None
        except (httpx.HTTPError, OSError) as error:
            raise Busy(f"{type(error).__name__}: {error}".rstrip(":. "), may_be_billed=True) from None
        if encoding := response.headers.get("content-encoding"):
            raise NoText(f"the response is encoded ({encoding[:40]}), though the request allows no encoding")
        return read_reply(response.status_code, response.headers, bytes(body), now=time.time())

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _open_client(self) -> httpx.AsyncClient:
        # Their lines show what a server writes beside the status, which may be the key.
        for name in ("httpx", "httpcore.http11"):
            logging.getLogger(name).addFilter(_is_no_request)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            return httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `attempt` has the other deadline
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency),
                transport=self.transport,
                trust_env=not is_loopback(self.base_url),  # a proxy cannot reach this machine's ports
            )
        except Exception:  # what httpx raises may quote the password of a proxy
            names = _set_variables(CLIENT_VARIABLES)
            raise UsageError(
                f"{self.base_url} cannot be asked with the environment variable {names}: correct or unset it"
            ) from None

    def _drop_field(self, name: str, reason: str) -> None:
        """Leave out a field in this call and all later ones; another call may have dropped it already."""
        if name not in self.fields:
            return
        fields = dict(self.fields)
        value = fields.pop(name)
        if name == "max_tokens":  # OpenAI's newer models know it by this name
            fields.setdefault("max_completion_tokens", value)
        self.fields = fields
        logger.warning("%s does not accept %s; continuing without: %s", self.name, name, reason)

    def _shown(self, reason: str) -> str:
        """An error text without the key, cut and printable."""
        # Scrub before cutting: half a key would not be found.
        return printable(" ".join(scrub(reason, self.key).split()))[:LONGEST_REASON]


def endpoint_of(
    name: str, *, key: str, fields: Mapping[str, object], system: str, concurrency: int
) -> Endpoint:
    """The endpoint of a SPEC: MODEL@URL, or MODEL at OPENAI_BASE_URL (default: OpenAI).

    Raises UsageError for a name or URL that is none, and for a key that is missing or cannot be a header: the
    error that httpx raises there contains the key.
    """
    model, at, rest = name.rpartition("@http")  # the name of a model may hold an @ too
    if not at:
        model, given = name, ""
    else:
        given = f"http{rest}"
    host = model.rpartition("@")[2] if "@" in model else ""
    has_host = host.startswith("localhost") or "." in host or ":" in host  # MODEL@localhost:8000
    if not model or re.search(r"\s|://", model) or has_host:
        raise UsageError(
            f"there is no environment {name!r}: give mini, MODEL, MODEL@http://host:port/v1 or hf:DIR "
            "(a URL begins with http:// or https://)"
        )
    base_url = _base_url(given or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    if not key and not given and not is_loopback(base_url):
        raise UsageError(
            f"the environment {name!r} at {base_url} needs a key: set OPENAI_API_KEY, or give --env mini "
            "or MODEL@http://host:port/v1"
        )
    key = key.strip()
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise UsageError(
            "OPENAI_API_KEY contains a line break, a blank or a non-ASCII character: copy it again"
        )
    return Endpoint(model, base_url, key=key, fields=fields, system=system, concurrency=concurrency)


def _base_url(text: str) -> str:
    """The base URL of an endpoint, in normal form. Raises UsageError, which does not show it."""
    try:
        url = httpx.URL(text.strip())
        host = url.host  # raises ValueError for an xn--… that is no name
    except (httpx.InvalidURL, ValueError):
        url, host = httpx.URL(""), ""
    is_plain = not (url.userinfo or url.query or url.fragment) and (url.port or 0) <= HIGHEST_PORT
    if url.scheme not in ("http", "https") or not host or not is_plain:
        raise UsageError(
            "the base URL of an endpoint must look like http://host:port/v1 "
            f"(without user, password or query; port at most {HIGHEST_PORT}; a key goes to OPENAI_API_KEY)"
        )
    return str(url).rstrip("/")


def check_listening(name: str) -> None:
    """Raise UsageError if the server of MODEL@URL is on this machine, and nothing listens there."""
    url = httpx.URL("http" + name.rpartition("@http")[2])
    if not is_loopback(str(url)):
        return
    try:
        socket.create_connection((url.host, url.port or (443 if url.scheme == "https" else 80)), 1).close()
    except ConnectionRefusedError:
        raise UsageError(f"{name}: no server answers there: start it, or correct the port") from None
    except OSError:
        return  # a request will tell


def is_loopback(base_url: str) -> bool:
    """Return whether the endpoint is on this machine."""
    return bool(re.fullmatch(r"(.+\.)?localhost|127(\.\d+){3}|::1", httpx.URL(base_url).host))


def _is_no_request(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO


def _set_variables(names: tuple[str, ...]) -> str:
    """Those of these environment variables that are set."""
    return " or ".join(name for name in os.environ if name.upper() in names and os.environ[name])


def _proxy_advice() -> str:
    proxies = _set_variables(("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"))
    return f", and the proxy in {proxies}" if proxies else ""
