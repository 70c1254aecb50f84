"""HTTP client of an OpenAI-compatible endpoint: retries, rate limits, timeouts, and a key that never leaks.

Environments and agents behind an endpoint share this client. A call holds one of `concurrency` slots and
makes up to `max_attempts` requests. Each request and each call has a deadline of its own, because httpx's
read timeout starts again with every chunk: a server that sends a blank line now and then would keep a call
open forever.
"""

import asyncio
import itertools
import json
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import httpx

from prompt_r1.endpoint.rate_limit import RateLimit
from prompt_r1.endpoint.request import (
    Request,
    Response,
    checked_base_url,
    checked_key,
    is_loopback,
    scrub_outcome,
)
from prompt_r1.endpoint.responses import Outcome, back_off, classify, model_names, reply_of
from prompt_r1.errors import UsageError
from prompt_r1.terminal import scrub

logger = logging.getLogger(__name__)

CHECK_SECONDS = 3.0
CALLS_OF_A_CLIENT = 64  # httpx goes through all connections of a client when one opens or closes
MOST_CLIENTS = 64
CALLS_OF_AN_ITERATION = 32  # of the event loop: each takes it about a millisecond
JSON_HEADERS = {"Content-Type": "application/json"}

Transport = httpx.AsyncBaseTransport  # tests pass httpx.MockTransport


@dataclass(frozen=True)
class ClientLimits:
    """How many calls run at once, how long they may take, and how often they are retried."""

    concurrency: int = 64  # calls in flight
    attempt_timeout: float = 120.0  # seconds for one request and its response
    call_deadline: float = 600.0  # seconds for all attempts of a call
    max_attempts: int = 6
    max_bytes: int = 10_000_000  # of a decompressed response
    requests_per_minute: float = 0.0  # 0: no limit
    tokens_per_minute: float = 0.0  # 0: no limit


@dataclass
class Connection:
    """The HTTP clients and the state that belong to one event loop."""

    loop: asyncio.AbstractEventLoop
    clients: list[httpx.AsyncClient]
    next_client: Iterator[httpx.AsyncClient]
    slots: asyncio.Semaphore
    turns: asyncio.Semaphore
    paused_until: float = 0.0  # loop time; the provider asked us to send nothing before

    async def take_turn(self) -> None:
        """Wait for an iteration of the event loop with room for the work of this call.

        A thousand requests that start at once, or as many responses, would block the loop for seconds.
        """
        async with self.turns:
            await asyncio.sleep(0)


@dataclass
class Delivery:
    """Which attempts of a call the provider may bill although they brought no reply."""

    sent: bool = False  # the request of the running attempt has been sent completely
    lost: int = 0  # attempts before it


class EndpointClient:
    """Sends requests for `model` to `base_url`, and retries them until they succeed or cannot.

    `fields` (temperature, max_tokens, …) are added to every request; a field that the model rejects is
    dropped for the rest of the run. Errors name `key_variable`, the environment variable that holds the key;
    fatal ones end with `key_note`, which says why no key was sent.

    Raises UsageError for a base URL or a key that cannot work.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        api_key: str = "",
        key_variable: str = "OPENAI_API_KEY",
        key_note: str = "",
        fields: Mapping[str, object] | None = None,
        limits: ClientLimits | None = None,
        rng: random.Random | None = None,
        transport: Transport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = model
        self.base_url = checked_base_url(base_url)
        self._key = checked_key(api_key, key_variable)
        self._key_variable = key_variable
        self._key_note = key_note
        self.fields: Mapping[str, object] = dict(fields or {})  # as configured
        self._accepted_fields = self.fields  # replaced, never mutated, when the model rejects a field
        self._limits = limits or ClientLimits()
        self._rate_limit = RateLimit(
            requests_per_minute=self._limits.requests_per_minute,
            tokens_per_minute=self._limits.tokens_per_minute,
        )
        self._rng = rng or random.Random()
        self._transport = transport
        self._sleep = sleep
        self._connection: Connection | None = None

    async def send(self, request: Request) -> Outcome:
        """Send a request, with retries, and return the final outcome, without the key in any of its texts.

        When it is cancelled, the argument of the CancelledError is the number of lost attempts.
        """
        connection, delivery = self._connect(), Delivery()
        try:
            async with connection.slots:
                wait = self._rate_limit_wait(connection, request)
                if wait > 0:
                    await self._sleep(wait)  # not counted against the call's deadline
                outcome = await self._send_with_retries(connection, request, delivery)
        except asyncio.CancelledError as cancelled:
            if not cancelled.args:  # anyio recognises its own by theirs
                cancelled.args = (delivery.lost + delivery.sent,)
            raise
        return self._readable(outcome)

    async def check(self, probe: Request) -> None:
        """Find a wrong URL, key or model within a few seconds. Raises UsageError or FatalEnvError.

        Looks for the model in the endpoint's list of models. Where that does not settle it (some endpoints
        have no list, some accept models that they do not list), sends `probe`. A slow or busy endpoint
        passes.
        """
        connection = self._connect()
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                models = await self._request(connection, "GET", "/models")
                if isinstance(models, Response) and self.model in model_names(models.body):
                    return
                if isinstance(models, Outcome) and models.reason.startswith("ConnectError"):
                    reason = scrub(models.reason, self._key)
                    raise UsageError(f"no server answers at {self.base_url}: {reason}")
                outcome = await self._attempt(connection, probe, self._accepted_fields, Delivery())
        except TimeoutError:
            return
        if outcome.verdict == "fatal" and outcome.rejected not in self._accepted_fields:
            reply_of(self._readable(outcome), f"{self.model} at {self.base_url}")

    async def close(self) -> None:
        """Close the connections of the running event loop. A later call opens new ones."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.loop is asyncio.get_running_loop():
            for client in connection.clients:
                await client.aclose()

    def _readable(self, outcome: Outcome) -> Outcome:
        """The outcome without the key in its texts; a fatal one says why no key was sent."""
        outcome = scrub_outcome(outcome, self._key)
        if outcome.verdict == "fatal" and self._key_note:
            return replace(outcome, reason=f"{outcome.reason}; {self._key_note}")
        return outcome

    def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            trust_env = not is_loopback(self.base_url)  # a proxy cannot reach this machine's ports
            certificates = httpx.create_ssl_context(trust_env=trust_env)  # loading them takes 20 ms
            clients = [
                httpx.AsyncClient(
                    headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                    timeout=None,  # we set our own deadlines
                    # The slots limit the number of connections. A connection is not used again: what a server
                    # sends on it after the response (some send it twice) would be taken as the next reply.
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                    verify=certificates,
                    trust_env=trust_env,
                    transport=self._transport,
                )
                for _ in range(min(MOST_CLIENTS, math.ceil(self._limits.concurrency / CALLS_OF_A_CLIENT)))
            ]
            self._connection = Connection(
                loop,
                clients,
                itertools.cycle(clients),
                slots=asyncio.Semaphore(self._limits.concurrency),
                turns=asyncio.Semaphore(CALLS_OF_AN_ITERATION),
            )
        return self._connection

    async def _send_with_retries(
        self, connection: Connection, request: Request, delivery: Delivery
    ) -> Outcome:
        """Send the same request until it succeeds, cannot succeed, or attempts or time run out.

        The outcome counts the attempts of the whole call that were lost.
        """
        failures, wait = 0, 0.0
        outcome = Outcome("retry", reason="no attempt ended")
        try:
            async with asyncio.timeout(self._limits.call_deadline):
                while failures < self._limits.max_attempts:
                    wait = max(wait, connection.paused_until - connection.loop.time())
                    if wait > 0:
                        await self._sleep(wait)
                    sent_fields = self._accepted_fields
                    outcome = await self._attempt(connection, request, sent_fields, delivery)
                    delivery.lost += outcome.lost
                    delivery.sent = False
                    if outcome.rejected in sent_fields:
                        self._drop_field(outcome.rejected)
                        wait = self._rate_limit_wait(connection, request)
                        continue
                    if outcome.verdict != "retry":
                        return replace(outcome, lost=delivery.lost)
                    failures += 1
                    wait = outcome.wait or back_off(failures, self._rng)
                    wait = max(wait, self._rate_limit_wait(connection, request))
                    if outcome.busy and outcome.wait:
                        paused_until = connection.loop.time() + outcome.wait
                        connection.paused_until = max(connection.paused_until, paused_until)
        except TimeoutError:
            limit = f"in {self._limits.call_deadline:g} s"
            delivery.lost += delivery.sent
        else:
            limit = f"in {failures} attempts"
        reason = f"{limit}, the last problem: {outcome.reason}"
        return replace(outcome, verdict="retry", reason=reason, lost=delivery.lost)

    async def _attempt(
        self, connection: Connection, request: Request, fields: Mapping[str, object], delivery: Delivery
    ) -> Outcome:
        body = {"model": self.model, **request.content, **fields}
        response = await self._request(connection, "POST", request.path, body, delivery=delivery)
        if isinstance(response, Outcome):
            return response
        outcome = classify(
            response.status,
            response.headers,
            response.body,
            now=time.time(),
            key_variable=self._key_variable,
        )
        tokens = outcome.tokens_in + outcome.tokens_out
        if tokens:
            self._rate_limit.correct(request.tokens, tokens)
        return outcome

    async def _request(
        self,
        connection: Connection,
        method: str,
        path: str,
        content: Mapping[str, object] | None = None,
        *,
        delivery: Delivery | None = None,
    ) -> Response | Outcome:
        """One HTTP exchange: the complete response, or a "retry" outcome that says why there is none."""
        sent = json.dumps(content) if content else ""  # ASCII: a lone surrogate could not be encoded
        url = self.base_url + path
        max_bytes = self._limits.max_bytes
        received = bytearray()
        delivery = delivery or Delivery()

        async def trace(event: str, info: Mapping[str, object]) -> None:
            """Called by httpx at each event of the connection."""
            if event.endswith("send_request_body.complete"):
                delivery.sent = True
            elif event.endswith("receive_response_headers.complete"):
                await connection.take_turn()

        await connection.take_turn()
        client = next(connection.next_client)
        try:
            async with (
                asyncio.timeout(self._limits.attempt_timeout),
                client.stream(
                    method, url, content=sent, headers=JSON_HEADERS, extensions={"trace": trace}
                ) as response,
            ):
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > max_bytes:
                        return Outcome("retry", reason=f"a response of over {max_bytes:,} bytes", lost=1)
        except TimeoutError:
            timeout = self._limits.attempt_timeout
            reason = f"no complete response within {timeout:g} s"
        except (httpx.HTTPError, OSError) as error:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        else:
            return Response(response.status_code, response.headers, bytes(received))
        return Outcome("retry", reason=reason, lost=1 if delivery.sent else 0)

    def _rate_limit_wait(self, connection: Connection, request: Request) -> float:
        """Seconds until our own rate limits allow this request."""
        now = connection.loop.time()
        return self._rate_limit.start_time(now, request.tokens) - now

    def _drop_field(self, field: str) -> None:
        """Leave out a field that the model rejects, in this call and all later ones."""
        if field not in self._accepted_fields:
            return  # another call has already dropped it
        fields = {name: value for name, value in self._accepted_fields.items() if name != field}
        if field == "max_tokens":
            fields.setdefault("max_completion_tokens", self._accepted_fields[field])
        self._accepted_fields = fields
        extra = fields or "no extra fields"
        logger.warning("%s does not accept %s; continuing with %s", self.model, field, extra)
