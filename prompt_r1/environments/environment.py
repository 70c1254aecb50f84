"""One or several environments behind `ask`.

A call has four steps. Each step calls the next:

    ask         draw the environment of the question, and wait for an equal call that is sent already
    _reply_to   take the reply from the journal if it is there
    _send       send requests, and back off after each failure, until there is a reply
    request     reserve the cost in the budget, let the source make one attempt, and charge what it cost

A source is a server (endpoint.py), a model in this process (local.py) or an object of the user (own.py).

Each request is added to `charged` of the run's budget and of the game's bill, and each reply to `spent` of
the bill. spending.py has a table of what is added when.
"""

import asyncio
import hashlib
import json
import logging
import random
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakValueDictionary

from prompt_r1.environments.budget import FREE, Bill, Budget, Price, check_usd_limit
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.route import Route
from prompt_r1.environments.sources import (
    CALL_DEADLINE,
    Busy,
    Caller,
    NoText,
    Refused,
    Reply,
    Source,
    byte_count,
)
from prompt_r1.environments.time_limit import TimeLimit
from prompt_r1.errors import EnvError, Resumable
from prompt_r1.spending import Spending
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

# The estimate of a request is never too low: a run may stop early, but may not exceed its budget. If nothing
# limits a reply, LONG_REPLY tokens are assumed. The reply may be longer, so specs.py then refuses a limit of
# dollars.
LONG_REPLY = 1024
FRAME_TOKENS = 20  # The role and the markers of a message have at most this many tokens.

MAX_EMPTY_RESPONSES = 6  # A call gives up after this many complete responses without a reply: each is billed.
MIN_BACK_OFF, MAX_BACK_OFF = 0.5, 30.0  # seconds
SILENT_SECONDS = 10.0  # A longer wait is reported, once in each outage.

# The share of failed calls is taken over the last 200 calls. Fewer than 100 calls count as 100, so that a few
# early failures do not end the run.
LAST_CALLS, MIN_CALLS = 200, 100
MAX_FAILED_SHARE = 0.20

NO_GAME = Caller()  # A call that no game makes.

# What is counted for the metrics. A call may need several requests.
COUNTED = (
    "paid",  # calls that were sent, because their reply was not in the journal; some cost nothing
    "failed_requests",  # requests without a reply
    "lost",  # failed requests that may have been billed
    "reused",  # calls whose reply was in the journal
    "errors",  # failed calls
    "tokens_in",
    "tokens_out",
)


class Client:
    """What sends requests to one source: its price, its counts, its slots, and the pause of its server."""

    def __init__(self, source: Source, price: Price, *, concurrency: int) -> None:
        self.source = source
        self.price = price
        self.slots = asyncio.Semaphore(concurrency)  # A call holds a slot while its requests are sent.
        self.time_limit = TimeLimit(source)
        self.paused_until = 0.0  # The server asked for no calls before this time of the event loop.
        self.is_wait_reported = False  # A reply resets it.
        self.counts = Counter[str]()  # What was counted since the last `take_metrics`, by names in COUNTED.

    def estimate(self, messages: list[Message]) -> Spending:
        """Estimate the cost of a request: from above, if something limits the reply."""
        # The system message and the fields are part of the request. They are in `parameters`.
        tokens_in = byte_count(str(self.source.parameters))
        tokens_in += sum(byte_count(message["content"]) + FRAME_TOKENS for message in messages)
        tokens_out = self.source.reply_limit or LONG_REPLY
        return self.price.of_call(tokens_in, tokens_out)

    def count_request(self, reply: Reply | None, *, is_lost: bool) -> None:
        """Count a request that has ended. If it is lost, it has no reply, but may be billed."""
        if reply is None:
            self.counts["failed_requests"] += 1
        else:
            self.counts["tokens_in"] += reply.tokens_in
            self.counts["tokens_out"] += reply.tokens_out
        if is_lost:
            self.counts["lost"] += 1

    def note_busy(self, busy: Busy, wait: float) -> None:
        """Pause all calls if the server asked for it, and report that a call waits for so many seconds."""
        if busy.wait:
            self.paused_until = max(self.paused_until, asyncio.get_running_loop().time() + busy.wait)
        if wait > SILENT_SECONDS and not self.is_wait_reported:
            self.is_wait_reported = True
            logger.warning("waiting for %s: %s", self.source, busy.reason)

    async def wait(self, seconds: float, *, deadline: float) -> bool:
        """Wait for `seconds`, and for the end of the pause. False if the deadline is earlier."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        # While this call waits, the response to another call may make the pause longer.
        while (until := max(end, self.paused_until)) > loop.time():
            if until > deadline:
                return False
            await asyncio.sleep(until - loop.time())
        return loop.time() <= deadline


@dataclass(frozen=True)
class Call:
    """One call of a game. It may need several requests."""

    client: Client
    messages: list[Message]
    caller: Caller
    bill: Bill

    @cached_property
    def key(self) -> str:
        """The key under which the reply is recorded. Calls with the same key share a reply.

        If the source samples, the calls of two games never have the same key.
        """
        source, caller = self.client.source, self.caller
        asked_by = [caller.question, caller.sample, caller.epoch] if source.samples else []
        text = json.dumps([source.name, source.parameters, self.messages, asked_by], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(eq=False)
class SharedCall:
    """A call that several games make at the same time. One of them sends it, and the others wait."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed_with: EnvError | Resumable | None = None  # the error of the call that was sent


class FailedCalls:
    """Whether the last calls that were sent to an environment failed. If too many did, the run ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed: deque[bool] = deque(maxlen=LAST_CALLS)

    def note_reply(self) -> None:
        """Note a call that got a reply."""
        self._failed.append(False)

    def error_after(self, failure: EnvError | Resumable) -> EnvError | Resumable:
        """Note a call that failed. Returns the error to raise: Resumable if too many calls have failed."""
        if isinstance(failure, Resumable):  # The run ends, whatever its calls.
            return failure
        self._failed.append(True)
        failed, calls = sum(self._failed), len(self._failed)
        if failed / max(calls, MIN_CALLS) <= MAX_FAILED_SHARE:
            return failure
        return Resumable(f"{failed} of the last {calls} calls of {self._name} failed, this one: {failure}")


class Environment:
    """One or several sources behind `ask`. Each sends the requests of at most `concurrency` calls at once.

    Raises UsageError for a route that does not match their number.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        journal: Journal | None = None,
        budget: Budget | None = None,
        prices: Sequence[Price] = (),
        route: str = "session",
        concurrency: int = sys.maxsize,
    ) -> None:
        self.name = ",".join(source.name for source in sources)
        self.budget = budget or Budget()
        self.journal = journal or Journal(None)
        prices = prices or [FREE] * len(sources)
        self.clients = [
            Client(source, price, concurrency=concurrency)
            for source, price in zip(sources, prices, strict=True)
        ]
        self._route = Route(route, len(sources))
        # By the keys of the calls. An entry vanishes when no game makes its call any more.
        self._shared_calls = WeakValueDictionary[str, SharedCall]()
        self._failed_calls = FailedCalls(self.name)

    async def ask(self, messages: list[Message], caller: Caller = NO_GAME, bill: Bill | None = None) -> Reply:
        """Return the reply of the environment that is drawn for the caller's question.

        The call is added to the bill, also if it fails. Raises EnvError if the call failed. Raises Resumable
        if the budget is used up, if the server accepts no calls, or if too many calls have failed.
        Raises LimitReached before a request that may exceed the limit of the bill. What the code of a user's
        object raises passes unchanged.
        """
        client = self.clients[self._route.draw(caller)]
        call = Call(client, messages, caller, bill or Bill())
        shared = SharedCall()
        if self.journal.is_on_disk:
            # Equal calls wait for each other, and then find the reply in the journal.
            shared = self._shared_calls.setdefault(call.key, shared)
        try:
            async with shared.lock:
                if shared.failed_with:
                    raise shared.failed_with
                reply = await self._reply_to(call, shared)
        except (EnvError, Resumable):
            # A resumed run may repeat the call with another number of requests, and `spent` must be the same.
            # So a failed call is always one call without tokens.
            call.bill.spent += Spending(calls=1)
            client.counts["errors"] += 1
            raise
        if reply.label:
            client.counts[f"outcomes/{reply.label}"] += 1
        return reply

    async def _reply_to(self, call: Call, shared: SharedCall) -> Reply:
        """Take the reply from the journal, or send the call.

        If the call fails, the equal calls that wait for it fail with the same error.
        """
        if recorded := self.journal.reply(call.key):
            reply, cost = recorded
            call.client.counts["reused"] += 1
            call.bill.spent += cost
            return reply
        try:
            reply = await self._send(call)
        except (EnvError, Resumable) as failure:
            shared.failed_with = self._failed_calls.error_after(failure)
            self._shared_calls.pop(call.key, None)  # A later call is sent again.
            raise shared.failed_with from None
        self._failed_calls.note_reply()
        return reply

    async def _send(self, call: Call) -> Reply:
        """Send the request of a call until there is a reply.

        No request begins later than CALL_DEADLINE seconds after the call has got its slot. Raises EnvError if
        the call failed, Resumable if the server accepts no calls, and what `request` raises before a request.
        """
        client = call.client
        name = client.source.name
        loop = asyncio.get_running_loop()
        failures = without_text = 0
        wait = 0.0
        problem = "the server asked for a pause"
        async with client.slots:
            deadline = loop.time() + CALL_DEADLINE
            while await client.wait(wait, deadline=deadline):
                try:
                    reply = await self.request(call, failures=failures)
                except Refused as refused:
                    if refused.concerns_all:
                        raise Resumable(f"{name} accepts no calls: {refused.reason}") from None
                    raise EnvError(f"{name} refused the dialogue: {refused.reason}") from None
                except Busy as busy:
                    failures += 1
                    if isinstance(busy, NoText):
                        without_text += 1
                    if without_text == MAX_EMPTY_RESPONSES:
                        raise EnvError(
                            f"{name} sent {MAX_EMPTY_RESPONSES} responses without a reply, the last: "
                            f"{busy.reason}"
                        ) from None
                    problem = busy.reason
                    wait = busy.wait or back_off(failures)
                    client.note_busy(busy, wait)
                else:
                    client.is_wait_reported = False
                    return reply
        raise EnvError(f"{name} did not reply within {CALL_DEADLINE:g} s; the last problem: {problem}")

    async def request(self, call: Call, *, failures: int = 0) -> Reply:
        """Send one request of a call, after `failures` requests that got no reply.

        The estimated cost is reserved in the budget, and written to the journal before the request is sent.
        However the request ends, bill, budget and journal are then charged with what it may have cost.
        Raises OutOfBudget or LimitReached before a request that does not fit, Busy if it takes too long, and
        what the source's attempt raises.
        """
        client = call.client
        estimate = client.estimate(call.messages)
        call.bill.check(estimate)
        await self.budget.reserve(estimate)
        cost_if_lost = replace(estimate, lost_usd=estimate.usd)
        try:
            number = self.journal.begin(call.key, cost_if_lost)
        except OSError:
            self.budget.settle(estimate, Spending())  # The request is not sent, so it costs nothing.
            raise
        if failures == 0:
            client.counts["paid"] += 1
        limit = client.time_limit.seconds(failures)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        # A request that is cancelled, or in which a user's object raises EnvError, may be billed. So its
        # estimate is charged, unless a reply or the source's error says what it costs.
        cost = cost_if_lost
        reply: Reply | None = None
        try:
            async with asyncio.timeout(limit) as timer:
                reply = await client.source.attempt(call.messages, call.caller)
            cost = client.price.of_call(reply.tokens_in, reply.tokens_out)
            client.time_limit.note_reply(loop.time() - begin)
            return reply
        except TimeoutError:
            if not timer.expired():  # The source has raised it itself.
                raise
            raise Busy(f"no complete response within {limit:g} s", may_be_billed=True) from None
        except Busy as busy:
            if not busy.may_be_billed:
                cost = Spending()
            raise
        except Refused:
            cost = Spending(calls=1)
            raise
        finally:
            client.count_request(reply, is_lost=cost is cost_if_lost)
            call.bill.charged += cost
            if reply:
                call.bill.spent += cost
            self.budget.settle(estimate, cost)
            # The journal comes last, because a full disk must not leave the reservation in the budget.
            prompt = call.messages[-1]["content"]
            self.journal.end(number, call.key, cost, reply, source=client.source.name, prompt=prompt)

    def check_usd_limit(self, flag: str) -> None:
        """Raise UsageError if the limit of dollars that `flag` names cannot be kept."""
        check_usd_limit(flag, [(client.price, client.source.reply_limit) for client in self.clients])

    async def close(self) -> None:
        """Close the connections. Another call opens new ones."""
        for client in self.clients:
            await client.source.close()

    def take_metrics(self) -> dict[str, float]:
        """Return what was counted since the last call of this method.

        The sums over all environments are env/NAME. Of several environments, each also has its own counts,
        env/NUMBER:ENVIRONMENT/NAME. Labelled replies are counted as outcomes/LABEL.
        """
        totals = Counter(dict.fromkeys(COUNTED, 0))
        for client in self.clients:
            totals.update(client.counts)
        # `step_metrics` (training/metrics.py) counts env/errors from the games.
        metrics = {f"env/{name}": float(count) for name, count in totals.items() if name != "errors"}
        for number, client in enumerate(self.clients, start=1):
            if len(self.clients) > 1:
                for name in totals:
                    metrics[f"env/{number}:{client.source.name}/{name}"] = float(client.counts[name])
            client.counts.clear()
        return metrics


def back_off(failures: int) -> float:
    """Seconds to wait after this many failures: exponential back-off with full jitter."""
    longest = min(MAX_BACK_OFF, MIN_BACK_OFF * 2.0 ** min(failures - 1, 10))
    return random.uniform(0, longest)
