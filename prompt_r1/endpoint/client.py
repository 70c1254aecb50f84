"""HTTP client of an OpenAI-compatible endpoint: retries, rate limits, timeouts.

A call holds one of `concurrency` slots and
makes up to `max_attempts` requests. Each request and each call has a deadline of its own, because httpx's
read timeout starts again with every chunk: a server that sends a blank line now and then would keep a call
open forever.
"""

import asyncio
import json
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import httpx

from prompt_r1.endpoint.request import (
    ApiKey,
    BadBody,
    Response,
    checked_base_url,
    checked_key,
    decoded,
    is_loopback,
    scrubbed,
)
from prompt_r1.endpoint.responses import Outcome, back_off, classify, model_names, reply_of
from prompt_r1.errors import UsageError
from prompt_r1.terminal import scrub

logger = logging.getLogger(__name__)

CHECK_SECONDS = 3.0
CALLS_OF_AN_ITERATION = 32  # of the event loop: each takes it about a millisecond

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


@dataclass
class Traffic:
    """What the calls of one event loop share."""

    loop: asyncio.AbstractEventLoop
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
    dropped for the rest of the run.

    Raises UsageError for a base URL or a key that cannot work.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        key: ApiKey | None = None,
        fields: Mapping[str, object] | None = None,
        limits: ClientLimits | None = None,
        rng: random.Random | None = None,
        transport: Transport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = model
        self.base_url = checked_base_url(base_url)
        self._trusts_proxies = not is_loopback(self.base_url)  # a proxy cannot reach this machine's ports
        self._key = checked_key(key or ApiKey())
        self.fields: Mapping[str, object] = dict(fields or {})  # as configured
        self._accepted_fields = self.fields  # replaced, never mutated, when the model rejects a field
        self._limits = limits or ClientLimits()
        self._next_start = 0.0  # loop time; `requests_per_minute` allows no request before
        self._rng = rng or random.Random()
        self._transport = transport
        self._sleep = sleep
        self._traffic: Traffic | None = None

    async def send(self, path: str, content: Mapping[str, object]) -> Outcome:
        """POST with retries. Returns the final outcome, without the key in any of its texts.

        `content` has everything but the model and the client's fields. When the call is cancelled, the
        argument of the CancelledError is the number of lost attempts.
        """
        traffic, delivery = self._traffic_of_loop(), Delivery()
        try:
            async with traffic.slots:
                wait = self._reserve_start()
                if wait > 0:
                    await self._sleep(wait)  # not counted against the call's deadline
                outcome = await self._send_with_retries(traffic, path, content, delivery)
        except asyncio.CancelledError as cancelled:
            if not cancelled.args:  # anyio recognises its own by theirs
                cancelled.args = (delivery.lost + delivery.sent,)
            raise
        return scrubbed(outcome, self._key)

    async def check(self, path: str, probe: Mapping[str, object]) -> None:
        """Find a wrong URL, key or model within a few seconds. Raises UsageError or FatalEnvError.

        Looks for the model in the endpoint's list of models. Where that does not settle it (some endpoints
        have no list, some accept models that they do not list), sends the content `probe`. A slow or busy
        endpoint passes.
        """
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                models = await self._request("GET", "/models", Delivery())
                if isinstance(models, Response) and self.model in model_names(models.body):
                    return
                if isinstance(models, Outcome) and models.reason.startswith("ConnectError"):
                    reason = scrub(models.reason, self._key.text)
                    raise UsageError(f"no server answers at {self.base_url}: {reason}")
                outcome = await self._attempt(path, {**probe, **self._accepted_fields}, Delivery())
        except TimeoutError:
            return
        if (
            isinstance(models, Response)
            and models.body.lstrip().startswith(b"<")
            and outcome.verdict == "retry"
        ):
            advice = "check the base URL, which often ends in /v1"
            raise UsageError(f"{self.base_url} answers with a web page, not with JSON: {advice}")
        if outcome.verdict == "fatal" and outcome.rejected not in self._accepted_fields:
            reply_of(scrubbed(outcome, self._key), f"{self.model} at {self.base_url}")

    def _traffic_of_loop(self) -> Traffic:
        loop = asyncio.get_running_loop()
        if self._traffic is None or self._traffic.loop is not loop:
            slots, turns = self._limits.concurrency, CALLS_OF_AN_ITERATION
            self._traffic = Traffic(loop, asyncio.Semaphore(slots), asyncio.Semaphore(turns))
        return self._traffic

    @cached_property
    def _certificates(self) -> ssl.SSLContext:
        return httpx.create_ssl_context(trust_env=self._trusts_proxies)  # takes 20 ms

    def _http_client(self) -> httpx.AsyncClient:
        """A client for one request.

        Its connection is not used again: what a server sends on it after the response (some send it twice)
        would be taken as the next reply. And httpx goes through all connections of a client when one opens or
        closes; a client of its own takes 0.1 ms.
        """
        headers = {"Content-Type": "application/json"}
        if self._key.text:
            headers["Authorization"] = f"Bearer {self._key.text}"
        return httpx.AsyncClient(
            headers=headers,
            timeout=None,  # we set our own deadlines
            verify=self._certificates,
            trust_env=self._trusts_proxies,
            transport=self._transport,
        )

    async def _send_with_retries(
        self, traffic: Traffic, path: str, content: Mapping[str, object], delivery: Delivery
    ) -> Outcome:
        """Send the same request until it succeeds, cannot succeed, or attempts or time run out.

        The outcome counts the attempts of the whole call that were lost.
        """
        failures, wait = 0, 0.0
        outcome = Outcome("retry", reason="no attempt ended")
        try:
            async with asyncio.timeout(self._limits.call_deadline):
                while failures < self._limits.max_attempts:
                    wait = max(wait, traffic.paused_until - traffic.loop.time())
                    if wait > 0:
                        await self._sleep(wait)
                    sent_fields = self._accepted_fields
                    outcome = await self._attempt(path, {**content, **sent_fields}, delivery)
                    delivery.lost += outcome.lost
                    delivery.sent = False
                    if outcome.rejected in sent_fields:
                        self._drop_field(outcome.rejected)
                        wait = self._reserve_start()
                        continue
                    if outcome.verdict != "retry":
                        return replace(outcome, lost=delivery.lost)
                    failures += 1
                    wait = outcome.wait or back_off(failures, self._rng)
                    wait = max(wait, self._reserve_start())
                    if outcome.busy and outcome.wait:
                        paused_until = traffic.loop.time() + outcome.wait
                        traffic.paused_until = max(traffic.paused_until, paused_until)
        except TimeoutError:
            limit = f"in {self._limits.call_deadline:g} s"
            delivery.lost += delivery.sent
        else:
            limit = f"in {failures} attempts"
        reason = f"{limit}, the last problem: {outcome.reason}"
        return replace(outcome, verdict="retry", reason=reason, lost=delivery.lost)

    async def _attempt(self, path: str, content: Mapping[str, object], delivery: Delivery) -> Outcome:
        response = await self._request("POST", path, delivery, {"model": self.model, **content})
        if isinstance(response, Outcome):
            return response
        return classify(response.status, response.headers, response.body, now=time.time())

    async def _request(
        self, method: str, path: str, delivery: Delivery, content: Mapping[str, object] | None = None
    ) -> Response | Outcome:
        """One HTTP exchange: the complete response, or a "retry" outcome that says why there is none."""
        sent = json.dumps(content) if content else ""  # ASCII: a lone surrogate could not be encoded
        received = bytearray()
        traffic = self._traffic_of_loop()

        async def trace(event: str, info: Mapping[str, object]) -> None:
            """Called by httpx at each event of the connection."""
            if event.endswith("send_request_body.complete"):
                delivery.sent = True
            elif event.endswith("receive_response_headers.complete"):
                await traffic.take_turn()

        await traffic.take_turn()
        client, url, extensions = self._http_client(), self.base_url + path, {"trace": trace}
        try:
            async with (
                asyncio.timeout(self._limits.attempt_timeout),
                client,
                client.stream(method, url, content=sent, extensions=extensions) as response,
            ):
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for chunk in response.stream:  # as sent: httpx would decode any amount of it
                    received += chunk
                    if len(received) > self._limits.max_bytes:
                        break
            body = decoded(received, response.headers.get("content-encoding", ""), self._limits.max_bytes)
            return Response(response.status_code, response.headers, body)
        except TimeoutError:
            reason = f"no complete response within {self._limits.attempt_timeout:g} s"
        except BadBody as error:
            return Outcome("retry", reason=str(error), lost=1)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:  # also of a redirect
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        return Outcome("retry", reason=reason, lost=1 if delivery.sent else 0)

    def _reserve_start(self) -> float:
        """Reserve the start of a request; returns the seconds until then. Starts are spread evenly."""
        now = asyncio.get_running_loop().time()
        start = max(now, self._next_start)
        if self._limits.requests_per_minute:
            self._next_start = start + 60 / self._limits.requests_per_minute
        return start - now

    def _drop_field(self, field: str) -> None:
        """Leave out a field that the model rejects, in this call and all later ones."""
        if field not in self._accepted_fields:
            return  # another call has already dropped it
        fields = dict(self._accepted_fields)
        value = fields.pop(field)
        if field == "max_tokens":
            fields.setdefault("max_completion_tokens", value)
        self._accepted_fields = fields
        extra = fields or "no extra fields"
        logger.warning("%s does not accept %s; continuing with %s", self.model, field, extra)
