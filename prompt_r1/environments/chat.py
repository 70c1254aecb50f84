"""Any OpenAI-compatible chat-completions endpoint as an environment (the only home of httpx).

A call has one slot of the concurrency limit, up to `max_attempts` requests, and two clocks of our own.
httpx's read timeout begins again with each chunk: a server that drips blank lines would hold a call for ever.
No text that leaves this file holds the key.
"""

import asyncio
import ipaddress
import json
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import httpx

from prompt_r1.environments.retry import Outcome, back_off, classify
from prompt_r1.types import EnvError, FatalEnvError, Message, UsageError

logger = logging.getLogger(__name__)

JSON_HEADERS = {"Content-Type": "application/json"}
LONGEST_REASON = 300  # characters of a provider's message
SHORTEST_SECRET = 12  # a shorter key ("EMPTY", "ollama") is a placeholder: replies may say the word


@dataclass
class Connection:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    quiet_until: float = 0.0  # loop time; nobody sends before, because the provider asked us to wait


class ChatEnvironment:
    """Asks `model` at `base_url`. `fields` (temperature, max_tokens, …) are added to each request.

    `system` opens every dialogue that has no system message. `record` is told the outcome of each call.
    `counts` has calls, attempts, errors, tokens in and out, and outcomes by label.

    Raises UsageError for a base URL or a key that cannot work.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str,
        api_key: str = "",
        concurrency: int = 64,
        attempt_timeout: float = 120.0,
        call_deadline: float = 600.0,
        max_attempts: int = 6,
        max_bytes: int = 10_000_000,
        fields: Mapping[str, object] | None = None,
        system: str = "",
        rng: random.Random | None = None,
        record: Callable[[list[Message], Outcome], None] = lambda messages, outcome: None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = model
        self.counts: Counter[str] = Counter()
        self._base_url = checked_base_url(base_url)
        self._key = checked_key(api_key)
        self._concurrency = concurrency
        self._attempt_timeout = attempt_timeout
        self._call_deadline = call_deadline
        self._max_attempts = max_attempts
        self._max_bytes = max_bytes
        self._fields = dict(fields or {})  # replaced, never changed, when the model refuses one of them
        self._system = system
        self._rng = rng or random.Random()
        self._record = record
        self._transport = transport
        self._sleep = sleep
        self._connection: Connection | None = None

    async def ask(self, messages: list[Message]) -> str:
        """The reply; "" where the environment's own doing left none. Raises EnvError or FatalEnvError."""
        if self._system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        connection = self._connect()
        async with connection.slots:
            outcome = await self._call(connection, messages)
        outcome = self._without_key(outcome)
        self._count(outcome)
        self._record(messages, outcome)
        if outcome.verdict == "retry":
            raise EnvError(f"{self.name} at {self._base_url} did not reply: {outcome.reason}")
        if outcome.verdict == "fatal":
            raise FatalEnvError(f"{self.name} at {self._base_url} refuses to work: {outcome.reason}")
        return outcome.text

    async def close(self) -> None:
        """Close the connections of the running event loop. A later call opens new ones."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.loop is asyncio.get_running_loop():
            await connection.client.aclose()

    def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=None,  # our clocks; and the slots, not the pool, are where calls wait
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._concurrency),
                trust_env=not is_loopback(self._base_url),  # a proxy cannot reach this machine's own ports
                transport=self._transport,
            )
            self._connection = Connection(loop, client, asyncio.Semaphore(self._concurrency))
        return self._connection

    async def _call(self, connection: Connection, messages: list[Message]) -> Outcome:
        """Send the same request until it succeeds, cannot succeed, or attempts or time are used up."""
        failures, wait, outcome = 0, 0.0, Outcome("retry", reason="no attempt ended")
        try:
            async with asyncio.timeout(self._call_deadline):
                while failures < self._max_attempts:
                    wait = max(wait, connection.quiet_until - connection.loop.time())
                    if wait > 0:
                        await self._sleep(wait)
                    sent = self._fields
                    outcome = await self._attempt(connection.client, messages, sent)
                    if outcome.rejected in sent:
                        self._adapt(outcome.rejected)
                        wait = 0.0
                        continue
                    if outcome.verdict != "retry":
                        return outcome
                    failures += 1
                    wait = outcome.wait or back_off(failures, self._rng)
                    if outcome.busy and outcome.wait:
                        quiet_until = connection.loop.time() + outcome.wait
                        connection.quiet_until = max(connection.quiet_until, quiet_until)
        except TimeoutError:
            limit = f"in {self._call_deadline:g} s"
        else:
            limit = f"in {failures} attempts"
        return replace(outcome, verdict="retry", reason=f"{limit}, the last problem: {outcome.reason}")

    async def _attempt(
        self, client: httpx.AsyncClient, messages: list[Message], fields: Mapping[str, object]
    ) -> Outcome:
        self.counts["attempts"] += 1
        # ASCII escapes: a lone surrogate in a message must not break the encoding.
        content = json.dumps({"model": self.name, "messages": messages, **fields})
        url = f"{self._base_url}/chat/completions"
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self._attempt_timeout),
                client.stream("POST", url, content=content, headers=JSON_HEADERS) as response,
            ):
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > self._max_bytes:
                        return Outcome("retry", reason=f"a response of over {self._max_bytes:,} bytes")
        except TimeoutError:
            return Outcome("retry", reason=f"no whole response within {self._attempt_timeout:g} s")
        except (httpx.HTTPError, OSError) as error:
            return Outcome("retry", reason=f"{type(error).__name__}: {error}".removesuffix(": "))
        return classify(response.status_code, response.headers, bytes(body), now=time.time())

    def _adapt(self, field: str) -> None:
        """Go on without a field that the model refuses; later calls begin with what was learnt."""
        if field not in self._fields:
            return  # another call was told first
        fields = {name: value for name, value in self._fields.items() if name != field}
        if field == "max_tokens":
            fields.setdefault("max_completion_tokens", self._fields[field])
        self._fields = fields
        logger.warning("%s does not take %s: going on with %s", self.name, field, fields or "no extra fields")

    def _count(self, outcome: Outcome) -> None:
        self.counts.update(calls=1, tokens_in=outcome.tokens_in, tokens_out=outcome.tokens_out)
        self.counts["errors"] += outcome.verdict in ("retry", "fatal")
        if outcome.label:
            self.counts[f"outcome/{outcome.label}"] += 1

    def _without_key(self, outcome: Outcome) -> Outcome:
        """Servers echo headers, in errors and (proxies for debugging) in replies."""
        # Cut after scrubbing: half a key would not be found.
        reason = " ".join(self._scrub(outcome.reason).split())[:LONGEST_REASON]
        if len(self._key) < SHORTEST_SECRET:
            return replace(outcome, reason=reason)
        text, reasoning = self._scrub(outcome.text), self._scrub(outcome.reasoning)
        return replace(outcome, text=text, reason=reason, reasoning=reasoning)

    def _scrub(self, text: str) -> str:
        return re.sub(re.escape(self._key), "[key]", text, flags=re.IGNORECASE) if self._key else text


def checked_key(key: str) -> str:
    """The key without blanks around it. httpx would show an illegal header value in its exception."""
    key = key.strip()
    if key and not re.fullmatch(r"[\x21-\x7e]+", key):
        raise UsageError("OPENAI_API_KEY holds a line break, a blank or a non-ASCII character: copy it again")
    return key


def checked_base_url(base_url: str) -> str:
    """The URL up to and without /chat/completions."""
    try:
        url = httpx.URL(base_url.strip())
    except httpx.InvalidURL:
        raise UsageError("the environment's base URL is not a URL: give http://host:port/v1") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise UsageError("the environment's base URL must look like http://host:port/v1 "
                         "(without user, password or query; a key goes to OPENAI_API_KEY)")  # fmt: skip
    return str(url).rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Is the endpoint on this machine?"""
    host = httpx.URL(base_url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
