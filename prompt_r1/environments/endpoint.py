"""An OpenAI-compatible endpoint as a source: `--env MODEL@URL`, over one shared HTTP client.

A call holds one of `concurrency` slots and repeats its request until there is a reply, none is possible, or
its time is over. Each request has a deadline of its own too, because httpx's read timeout starts again with
every chunk: a server that sends a blank line now and then would keep a request open forever.
"""

import asyncio
import json
import logging
import os
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

import httpx

from prompt_r1.environments.environment import BILLED_CHARACTERS_PER_TOKEN
from prompt_r1.environments.responses import MOST_BYTES, Attempt, back_off, classify, failed
from prompt_r1.environments.sources import AskOutcome, Call, Outcome, Source
from prompt_r1.errors import FatalEnvError, Resumable, UsageError
from prompt_r1.programs.keys import SHORTEST_SECRET, scrub
from prompt_r1.programs.text import printable
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
CHECK_SECONDS = 5.0
CHECKS = 3  # requests of the check that may bring no chat completion
CONNECT_SECONDS = 30.0
MOST_ANSWERS = 6  # of a call, that are billed but no reply; other requests are repeated until time ends
SILENT_SECONDS = 10.0  # the first wait since a reply that is longer is reported, with its reason
LONGEST_REASON = 300  # characters of a provider's error message
HIGHEST_PORT = 65535
# The end of a SPEC whose URL lacks its scheme. Other names of models may hold an @ too.
HOST = re.compile(
    r"@(localhost|([\w-]+\.)+[a-z]{2,}|\d+(\.\d+){3}|[\w.-]+(?=:\d)|\[[\w:.]+\])(:\d+)?(/[^@]*)?$",
    re.IGNORECASE,
)
UNREADABLE = re.compile(r"\bHTTP (400|422|500)\b")  # also answered to a system message that is not accepted
# Read when a client is made.
VARIABLES = re.compile("(ALL|HTTPS?|NO)_PROXY|SSL_CERT_(FILE|DIR)|SSLKEYLOGFILE", re.IGNORECASE)


@dataclass(repr=False, eq=False)
class Endpoint(Source):
    """Asks the model `name` at `base_url`. `system` opens every dialogue that has no system message.

    `fields` (temperature, max_tokens, …) are added to every request; a field that the model rejects is
    dropped for the rest of the run. In seconds, `attempt_timeout` bounds a request and its response, and
    `call_deadline` all requests of a call.
    """

    name: str
    base_url: str
    _: KW_ONLY
    key: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    system: str = ""
    concurrency: int = 64
    attempt_timeout: float = 120.0
    call_deadline: float = 600.0
    transport: httpx.AsyncBaseTransport | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self.parameters: Mapping[str, object] = {"url": self.base_url, "system": self.system, **self.fields}
        self.samples = self.fields.get("temperature") != 0
        self._checking = False  # the check makes one request
        self._client: httpx.AsyncClient | None = None  # of the event loop, like the slots
        self._paused_until = 0.0  # loop time; the provider asked us to send nothing before
        self._reported = False  # what is waited for

    async def reply(self, call: Call) -> Outcome:
        """The outcome after all requests, without the key in any of its texts."""
        messages = call.messages
        if self.system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        if self._client is None:
            self._closing = self._open_client()
            self._client = await anext(self._closing)
            self._slots = asyncio.Semaphore(self.concurrency)
        async with self._slots:
            outcome = await self._send_until_done(self._client, call, messages)
        if not outcome.replied or outcome.reason:  # a request that was rejected costs nothing
            return outcome
        # Without counts, a reply would be free.
        sent = sum(len(message["content"]) for message in messages)
        written = len(outcome.text) + len(outcome.reasoning)
        return replace(
            outcome,
            tokens_in=outcome.tokens_in or -(-sent // BILLED_CHARACTERS_PER_TOKEN),
            tokens_out=outcome.tokens_out or -(-written // BILLED_CHARACTERS_PER_TOKEN),
        )

    async def check(self, ask: AskOutcome) -> None:
        """Find a wrong URL, key, model or setting within a few seconds. A slow or busy endpoint passes."""
        self._checking, system = True, self.system
        shown, outcome = f"{self.name} at {self.base_url}", Outcome("failed")
        with suppress(TimeoutError, Resumable):
            async with asyncio.timeout(CHECK_SECONDS):
                outcome = await ask([{"role": "user", "content": "Hi"}])
                if system and UNREADABLE.search(outcome.reason):
                    self.system = ""
                    accepted = (await ask([{"role": "user", "content": "Hello"}])).replied
                    self.system = system
                    if accepted:  # once more, because a 500 may have been a moment's
                        outcome = await ask([{"role": "user", "content": "Hi"}])
                    if accepted and UNREADABLE.search(outcome.reason):
                        raise UsageError(
                            f'{shown} takes no system message: give --env-system "" ({outcome.reason})'
                        )
        self._checking, self.system = False, system
        if outcome.verdict == "refused":
            raise FatalEnvError(f"{self.name} cannot be used: {self.base_url}: {outcome.reason}")
        if outcome.replied and not outcome.text.strip():
            raise UsageError(
                f'{shown} replied to "Hi" without any text ({outcome.reason or outcome.label}): check '
                "max_tokens and the other fields of --env-args, or choose another model"
            )

    async def _send_until_done(
        self, client: httpx.AsyncClient, call: Call, messages: list[Message]
    ) -> Outcome:
        """Send a request until it succeeds or cannot succeed, too many were lost, or the time is over."""
        failures, answers, wait, now = 0, 0, 0.0, asyncio.get_running_loop().time
        attempt = failed("no request ended")
        dialogue = " ".join(message["content"] for message in messages)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.call_deadline):
                while answers < MOST_ANSWERS:
                    wait = max(wait, self._paused_until - now())
                    if wait > 0:
                        await self.sleep(wait)
                    fields = self.fields
                    await call.begin()
                    attempt = await self._attempt(client, {"messages": messages, **fields})
                    attempt = replace(attempt, outcome=self._without_key(attempt.outcome))
                    named = [name for name in fields if re.search(rf"\b{re.escape(name)}\b", attempt.blamed)]
                    if named and named[0] not in dialogue:  # otherwise it may only repeat the dialogue
                        call.give_up(False)
                        self._drop_field(named[0])
                        continue
                    if attempt.outcome.verdict != "failed":
                        self._reported = False
                        return attempt.outcome
                    call.give_up(attempt.lost)
                    failures += 1
                    if self._checking:
                        if not attempt.misdirected:
                            return attempt.outcome
                        if failures == CHECKS:
                            return replace(attempt.outcome, verdict="refused")
                        continue
                    answers += attempt.lost and attempt.misdirected
                    wait = attempt.wait or back_off(failures, random.Random())
                    if wait > SILENT_SECONDS and not self._reported:
                        self._reported = True
                        shown = attempt.outcome.reason
                        logger.warning("waiting for %s at %s: %s", self.name, self.base_url, shown)
                    if attempt.wait:  # all calls wait
                        self._paused_until = max(self._paused_until, now() + attempt.wait)
        call.give_up(True)  # of a request that the deadline cut off
        limit = f"{failures} requests" if answers == MOST_ANSWERS else f"{self.call_deadline:g} s"
        reason = f"{self.name} did not reply: in {limit}, the last problem: {attempt.outcome.reason}"
        return replace(attempt.outcome, reason=reason)

    async def _attempt(self, client: httpx.AsyncClient, content: Mapping[str, object]) -> Attempt:
        """One request: what its response means, or why there is none."""
        body = json.dumps({"model": self.name, **content})  # ASCII: a lone surrogate could not be encoded
        received, waited = bytearray(), asyncio.Event()

        async def refuse_early_response(event: str, info: object) -> None:
            """Some servers send a response twice: what is there before we wait for it is not our reply."""
            if event == "http11.receive_response_headers.started":
                asyncio.get_running_loop().call_soon(waited.set)
            elif event == "http11.receive_response_headers.complete" and not waited.is_set():
                raise httpx.RemoteProtocolError("a response that was sent before its request")

        try:
            async with (
                asyncio.timeout(self.attempt_timeout),
                client.stream(
                    "POST",
                    self.base_url + "/chat/completions",
                    content=body,
                    extensions={"trace": refuse_early_response},
                ) as response,
            ):
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > MOST_BYTES:
                        break
            return classify(response.status_code, response.headers, bytes(received), now=time.time())
        except TimeoutError:
            return failed(f"no complete response within {self.attempt_timeout:g} s", lost=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, ExceptionGroup) as error:
            # asyncio's errors are a group where a proxy's port is above the highest one
            said = f"({str(error) or type(error).__name__}): check the host and the port"
            if (proxies := _variables("PROXY")) and not is_loopback(self.base_url):
                said += f", and {proxies}"
            if "[SSL" not in said:
                return failed(f"no server answers {said}", misdirected=True)
            own = "for a certificate of your own, set SSL_CERT_FILE"
            return failed(f"no secure connection {said}, and http or https; {own}", misdirected=True)
        except (httpx.HTTPError, OSError) as error:
            said = f"{type(error).__name__}: {error}".rstrip(":. ")
            is_no_http = "illegal" in said  # h11's word for lines that are none of HTTP
            if is_no_http or "without sending" in said:
                said += "; check http or https and the port"
            return failed(said, lost=True, misdirected=is_no_http)

    async def _open_client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Yield the client of an event loop, which ends this generator, and the connections, when it ends."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency)
        transport = self.transport
        try:
            if transport is None and is_loopback(self.base_url):  # a proxy cannot reach this machine's ports
                is_tls = self.base_url.startswith("https:")
                transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=is_tls)
            client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # other deadlines are our own
                limits=limits,
                event_hooks={"response": [_hide_headers]},
                transport=transport,
            )
        except Exception as error:  # nothing else can fail
            kind = "SSL" if isinstance(error, OSError) else "PROXY"
            said = "it is no URL; write # / @ of a password as %23 %2F %40"  # an error may quote a password
            if isinstance(error, OSError | ImportError):
                said = self._scrubbed(str(error))
            raise UsageError(
                f"the environment variable {_variables(kind)} cannot be used for "
                f"{self.base_url}: {said}; correct or unset it"
            ) from None
        try:
            async with client:
                yield client
        finally:
            self._client = None

    def _drop_field(self, rejected: str) -> None:
        """Leave out a field that the model rejects, in this call and all later ones."""
        if rejected not in self.fields:
            return  # another call has already dropped it
        fields = dict(self.fields)
        value = fields.pop(rejected)
        if rejected == "max_tokens":
            fields.setdefault("max_completion_tokens", value)
        self.fields = fields
        logger.warning("%s does not accept %s; continuing without", self.name, rejected)

    def _scrubbed(self, reason: str) -> str:
        """An error text without the key, cut and printable."""
        # Scrub before cutting: half a key would not be found.
        return printable(" ".join(scrub(reason, self.key)[: 9 * LONGEST_REASON].split()))[:LONGEST_REASON]

    def _without_key(self, outcome: Outcome) -> Outcome:
        """Remove the key from the texts of an outcome: servers echo headers in errors, some in replies."""
        secret = self.key if len(self.key) >= SHORTEST_SECRET else ""
        return replace(
            outcome,
            text=scrub(outcome.text, secret),
            reason=self._scrubbed(outcome.reason),
            reasoning=scrub(outcome.reasoning, secret),
            finish=scrub(outcome.finish, secret),
        )


async def _hide_headers(response: httpx.Response) -> None:
    """Rename headers that httpx acts on: we follow no redirect, and see in a body how it is encoded."""
    for name in ("location", "content-encoding"):
        if name in response.headers:
            response.headers[f"sent-{name}"] = response.headers.pop(name)


def parse_endpoint(name: str, *, key: str) -> Callable[..., Endpoint]:
    """What opens the endpoint of a SPEC: MODEL@URL, or MODEL at OPENAI_BASE_URL (default: OpenAI).

    Raises UsageError for a name or URL that is none, and for a key that is missing or cannot be a header: the
    error that httpx raises there contains the key.
    """
    match = re.fullmatch(r"(?!https?:)([^\s,]+?)(?:@(https?://[^\s,]+))?", name)
    if match is None or re.search("://|@https?:", match[1], re.IGNORECASE) or HOST.search(match[1]):
        raise UsageError(
            f"there is no environment {name!r}: give mini, MODEL, MODEL@http://host:port/v1 or hf:DIR "
            "(a URL begins with http:// or https://)"
        )
    model, given = match.groups()
    try:
        url = httpx.URL((given or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).strip())
        host = url.host  # raises ValueError for an xn--… that is no name
    except (httpx.InvalidURL, ValueError):
        url, host = httpx.URL(""), ""
    is_plain = not (url.userinfo or url.query or url.fragment) and (url.port or 0) <= HIGHEST_PORT
    if url.scheme not in ("http", "https") or not host or not is_plain:
        raise UsageError(
            "the base URL of an endpoint must look like http://host:port/v1 "
            f"(without user, password or query; port at most {HIGHEST_PORT}; a key goes to OPENAI_API_KEY)"
        )
    base_url = str(url).rstrip("/")
    if not key and not given and not is_loopback(base_url):
        raise UsageError(
            f"the environment {name!r} at {base_url} needs a key: set OPENAI_API_KEY, or give --env mini "
            "or MODEL@http://host:port/v1"
        )
    if not re.fullmatch(r"[\x21-\x7e]*", key.strip()):
        raise UsageError(
            "OPENAI_API_KEY contains a line break, a blank or a non-ASCII character: copy it again"
        )
    return partial(Endpoint, model, base_url, key=key.strip())


def check_listening(name: str) -> None:
    """Raise UsageError if the server of MODEL@URL is on this machine, and nothing listens there."""
    url = httpx.URL("http" + name.partition("@http")[2])  # the name of a model may hold an @ too
    if not is_loopback(str(url)):
        return
    try:
        socket.create_connection((url.host, url.port or (443 if url.scheme == "https" else 80)), 1).close()
    except ConnectionRefusedError:
        raise UsageError(f"{name}: no server answers there: start it, or correct the port") from None
    except OSError:
        return  # a request will tell


def _variables(kind: str) -> str:
    """The names of the environment variables of proxies ("PROXY") or certificates ("SSL") that are set."""
    names = [name for name in os.environ if VARIABLES.fullmatch(name) and kind in name.upper()]
    return " or ".join(filter(os.environ.get, names))


def is_loopback(base_url: str) -> bool:
    """Return whether the endpoint is on this machine."""
    return bool(re.fullmatch(r"(.+\.)?localhost|127(\.\d+){3}|::1", httpx.URL(base_url).host))
