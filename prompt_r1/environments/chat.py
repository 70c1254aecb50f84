"""Any OpenAI-compatible chat-completions endpoint as an environment (the only home of httpx).

A call has one slot of the concurrency limit, up to `max_attempts` requests, and two clocks of our own.
httpx's read timeout begins again with each chunk: a server that drips blank lines would hold a call for ever.
No text that leaves this file holds the key.
"""

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import httpx

from prompt_r1.endpoint.rate_limit import Pace
from prompt_r1.endpoint.request import (
    Request,
    Response,
    checked_base_url,
    checked_key,
    is_loopback,
    scrub,
    without_key,
)
from prompt_r1.endpoint.responses import Outcome, back_off, classify, model_names, reply_of
from prompt_r1.errors import UsageError
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

USUAL_REPLY = 200  # tokens, for the limit of tokens a minute; corrected when the true number is known
CHECK_SECONDS = 3.0
JSON_HEADERS = {"Content-Type": "application/json"}


@dataclass
class Connection:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    quiet_until: float = 0.0  # loop time; nobody sends before, because the provider asked us to wait


HELLO = Request("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, USUAL_REPLY)


class ChatEnvironment:
    """Asks `model` at `base_url`. `fields` (temperature, max_tokens, …) are added to each request.

    `system` opens every dialogue that has no system message. `counts`: calls, attempts, errors, tokens,
    outcomes by label.

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
        requests_per_minute: float = 0.0,
        tokens_per_minute: float = 0.0,
        fields: Mapping[str, object] | None = None,
        system: str = "",
        rng: random.Random | None = None,
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
        self._transport = transport
        self._sleep = sleep
        self._pace = Pace(requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute)
        self._connection: Connection | None = None
        self.parameters: Mapping[str, object] = {"system": system, **self._fields}  # as they were asked for

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        """The reply; "" where the environment's own doing left none. Raises EnvError or FatalEnvError."""
        outcome = await self.call(messages, sample=sample)
        return reply_of(outcome, f"{self.name} at {self._base_url}")

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        """What the call came to in the end. The provider draws its own samples: it is not told `sample`."""
        if self._system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        letters = sum(len(message["content"]) for message in messages)
        return await self.send(
            Request("/chat/completions", {"messages": messages}, letters // 4 + USUAL_REPLY)
        )

    async def send(self, request: Request) -> Outcome:
        """What any request came to in the end."""
        connection = self._connect()
        async with connection.slots:
            wait = self._turn(connection, request)
            if wait > 0:
                await self._sleep(wait)  # our own limit: the provider's clock does not run
            outcome = await self._call(connection, request)
        outcome = without_key(outcome, self._key)
        self._count(outcome)
        return outcome

    async def check(self, probe: Request = HELLO) -> None:
        """Find a wrong URL, key or model within seconds. Where the endpoint's list of models does not settle
        it (some have none, some know more names than they list), one short call does. Raises UsageError or
        FatalEnvError; says nothing of an endpoint that is only slow or busy.
        """
        client = self._connect().client
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                found = await self._request(client, "GET", "/models")
                if isinstance(found, Response) and self.name in model_names(found.body):
                    return
                if isinstance(found, Outcome) and found.reason.startswith("ConnectError"):
                    raise UsageError(f"nobody answers at {self._base_url}: {scrub(found.reason, self._key)}")
                outcome = await self._attempt(client, probe, self._fields)
        except TimeoutError:
            return
        if outcome.verdict == "fatal" and outcome.rejected not in self._fields:
            reply_of(without_key(outcome, self._key), f"{self.name} at {self._base_url}")

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

    async def _call(self, connection: Connection, request: Request) -> Outcome:
        """Send the same request until it succeeds, cannot succeed, or attempts or time are used up."""
        failures, wait, outcome = 0, 0.0, Outcome("retry", reason="no attempt ended")
        try:
            async with asyncio.timeout(self._call_deadline):
                while failures < self._max_attempts:
                    wait = max(wait, connection.quiet_until - connection.loop.time())
                    if wait > 0:
                        await self._sleep(wait)
                    sent = self._fields
                    outcome = await self._attempt(connection.client, request, sent)
                    if outcome.rejected in sent:
                        self._adapt(outcome.rejected)
                        wait = self._turn(connection, request)
                        continue
                    if outcome.verdict != "retry":
                        return outcome
                    failures += 1
                    wait = outcome.wait or back_off(failures, self._rng)
                    wait = max(wait, self._turn(connection, request))
                    if outcome.busy and outcome.wait:
                        quiet_until = connection.loop.time() + outcome.wait
                        connection.quiet_until = max(connection.quiet_until, quiet_until)
        except TimeoutError:
            limit = f"in {self._call_deadline:g} s"
        else:
            limit = f"in {failures} attempts"
        return replace(outcome, verdict="retry", reason=f"{limit}, the last problem: {outcome.reason}")

    async def _attempt(
        self, client: httpx.AsyncClient, request: Request, fields: Mapping[str, object]
    ) -> Outcome:
        self.counts["attempts"] += 1
        body = {"model": self.name, **request.content, **fields}
        response = await self._request(client, "POST", request.path, body)
        if isinstance(response, Outcome):
            return response
        outcome = classify(response.status, response.headers, response.body, now=time.time())
        if outcome.tokens_in or outcome.tokens_out:
            self._pace.correct(request.tokens, outcome.tokens_in + outcome.tokens_out)
        return outcome

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, request: object = None
    ) -> Response | Outcome:
        """The whole response, or an Outcome that says why there is none."""
        # ASCII escapes: a lone surrogate must not break the encoding.
        content = json.dumps(request) if request else ""
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self._attempt_timeout),
                client.stream(
                    method, self._base_url + path, content=content, headers=JSON_HEADERS
                ) as response,
            ):
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > self._max_bytes:
                        return Outcome("retry", reason=f"a response of over {self._max_bytes:,} bytes")
        except TimeoutError:
            return Outcome("retry", reason=f"no whole response within {self._attempt_timeout:g} s")
        except (httpx.HTTPError, OSError) as error:
            return Outcome("retry", reason=f"{type(error).__name__}: {error}".removesuffix(": "))
        return Response(response.status_code, response.headers, bytes(body))

    def _turn(self, connection: Connection, request: Request) -> float:
        """Seconds until our own limits let the next request start."""
        now = connection.loop.time()
        return self._pace.start(now, request.tokens) - now

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
