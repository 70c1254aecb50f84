"""One or several environments behind `ask`.

A call has four steps. Each step calls the next:

    ask        draw the environment of the question, and count how its call ends
    _call      take the reply from the journal if it is there
    _repeat    send the request until there is a reply
    _request   reserve the cost in the budget, let the source make one attempt, and settle what it cost

A source is a server (endpoint.py), a model in this process (local.py) or an object of the user (sources.py).
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from prompt_r1.environments.budget import FREE, Budget, OutOfBudget, Price
from prompt_r1.environments.journal import Journal, call_key
from prompt_r1.environments.sources import (
    BILLED_CHARACTERS_PER_TOKEN,
    Bill,
    Busy,
    Caller,
    NoServer,
    NoText,
    Refused,
    Reply,
    Source,
)
from prompt_r1.errors import EnvError, FatalEnvError, LimitReached, Resumable, UsageError
from prompt_r1.types import Message, Spending

logger = logging.getLogger(__name__)

# A request is estimated from above, because a budget may end early, but not late.
LONG_REPLY = 1024  # If a request sets no limit, at least this many tokens are reserved for its reply.
FRAME_CHARACTERS = 20  # The role and the markers of a message are estimated as this many characters.
INITIAL_SLOTS = 4  # If nothing bounds what replies cost, only this many requests run at once at first.

CALL_DEADLINE = 600.0  # A call repeats its request for at most this many seconds.
MAX_EMPTY_RESPONSES = 6  # A call gives up after this many complete responses without a reply: each is billed.
MIN_BACK_OFF, MAX_BACK_OFF = 0.5, 30.0  # seconds
SILENT_SECONDS = 10.0  # A longer wait is reported, once in each outage.
CHECK_SECONDS = 5.0  # The check of an environment waits this long for a reply.

NO_GAME = Caller()  # A call that no game makes.
ONE_FREE_CALL = Spending(calls=1)  # A refused or failed call counts as a call, and costs nothing.
# The share of failed calls is taken over the last 200 calls. Fewer than 100 calls count as 100, so that one
# early failure raises no alarm.
WINDOW, MIN_CALLS = 200, 100
WARN_ABOVE, STOP_ABOVE = 0.05, 0.20  # shares of failed calls

# What is counted for the metrics. A call may need several requests.
COUNTED = (
    "paid",  # calls that were sent, also if they failed or were free
    "failed_requests",  # requests without a reply
    "lost",  # failed requests that may have been billed
    "reused",  # calls whose reply was in the journal
    "errors",  # failed calls
    "tokens_in",
    "tokens_out",
)


@dataclass(eq=False)
class Member:
    """A source with its price, its counts, and what is known about it."""

    source: Source
    price: Price
    limits_usd: bool  # whether the budget limits dollars
    slots: asyncio.Semaphore = field(init=False)  # Each call holds a slot while its requests are sent.
    slot_count: int = field(init=False)  # how many slots there are, free or held
    has_replied: bool = False
    longest_reply: int = 0  # tokens
    paused_until: float = 0.0  # The server asked for no calls before this time of the event loop.
    is_wait_reported: bool = False
    counts: Counter[str] = field(default_factory=Counter)  # since the last `take_metrics`; see COUNTED

    def __post_init__(self) -> None:
        self.open_slots()

    def estimate(self, messages: list[Message]) -> Spending:
        """Estimate the cost of a request from above.

        The estimate is too low only if the request sets no limit and its reply is longer than all before.
        """
        characters = len(str(self.source.parameters))
        characters += sum(len(message["content"]) + FRAME_CHARACTERS for message in messages)
        limit = self.source.reply_limit()
        longest = max(LONG_REPLY, self.longest_reply) if limit is None else limit
        return self.price.of_call(characters // BILLED_CHARACTERS_PER_TOKEN, longest)

    def open_slots(self) -> None:
        """Open as many slots as the source may have concurrent requests.

        If dollars are limited, but nothing bounds what a reply costs, only INITIAL_SLOTS are opened, and
        `note_reply` opens another slot with each reply.
        """
        self.slot_count = self.source.concurrency
        if self.limits_usd and self.source.reply_limit() is None:
            self.slot_count = min(self.slot_count, INITIAL_SLOTS)
        self.slots = asyncio.Semaphore(self.slot_count)

    def note_reply(self, reply: Reply) -> None:
        """Note that the source replies, and how long its reply is. Open another slot if any is missing."""
        self.has_replied = True
        self.is_wait_reported = False
        self.longest_reply = max(self.longest_reply, reply.tokens_out)
        if self.slot_count < self.source.concurrency:
            self.slot_count += 1
            self.slots.release()


@dataclass(frozen=True)
class Checked:
    """What a check has learned about a source. The ranks that do not check take it over."""

    has_replied: bool
    longest_reply: int  # tokens
    left_out: Sequence[str]  # the fields that the server rejects


@dataclass
class Call:
    """A call whose reply is not in the journal, and what its requests were charged so far."""

    member: Member
    messages: list[Message]
    caller: Caller
    bill: Bill
    key: str  # identifies the call in the journal
    number: int  # the call's number in the journal of this rank
    charged: Spending = field(default_factory=Spending)

    def estimate(self) -> Spending:
        """Estimate the cost of the next request. Raises LimitReached if the bill may exceed its limit."""
        estimate = self.member.estimate(self.messages)
        charged, limit = self.bill.charged_usd, self.bill.max_usd
        if charged + estimate.usd > limit:
            raise LimitReached(
                "usd", f"the next request may exceed the limit of ${limit:g}; spent: ${charged:.6f}"
            )
        return estimate


class Environment:
    """One or several sources behind `ask`. Raises UsageError for a route that does not match their number."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        journal: Journal | None = None,
        budget: Budget | None = None,
        prices: Sequence[Price] = (),
        route: str = "session",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = ",".join(source.name for source in sources)
        self.budget = budget or Budget()
        self.journal = journal or Journal(None)
        # The estimates of a resumed run begin with the longest reply in its journal, of whichever source.
        longest = max((reply.tokens_out for reply in self.journal.replies.values()), default=0)
        self.members: list[Member] = []
        for source, price in zip(sources, prices or [FREE] * len(sources), strict=True):
            self.members.append(Member(source, price, self.budget.limits_usd, longest_reply=longest))
        self._route = route
        self._weights = parse_weights(route, len(sources))
        self._sleep = sleep
        # The lock of each call that is being made, by the call's key.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # For each of the last calls: whether it failed.
        self._warned = False

    async def ask(self, messages: list[Message], caller: Caller = NO_GAME, bill: Bill | None = None) -> Reply:
        """Return the reply of the environment that is drawn for the caller's question.

        The call is added to the bill, also if it fails. Raises EnvError if the call failed, FatalEnvError if
        no call can succeed, and Resumable if the budget is used up, if the endpoint accepts no calls any
        more, or if too many calls have failed. Raises LimitReached before a request that may exceed the limit
        of the bill.
        """
        bill = bill or Bill()
        # The run's seed is no part of this seed, so a question gets the same environment in every run.
        seed = caller.question if self._route == "session" else f"{caller.question}/{caller.epoch}"
        member = random.Random(seed).choices(self.members, self._weights)[0]
        try:
            reply = await self._call(member, messages, caller, bill)
        except (EnvError, Refused) as problem:
            bill.spent += ONE_FREE_CALL
            member.counts["errors"] += 1
            error = error_of_call(member, problem)
            if isinstance(error, EnvError):
                self._watch(failed=True, reason=str(error))
            raise error from None
        self._watch(failed=False)
        if reply.label:
            member.counts[f"outcomes/{reply.label}"] += 1
        bill.spent += member.price.of_call(reply.tokens_in, reply.tokens_out)
        return reply

    async def _call(self, member: Member, messages: list[Message], caller: Caller, bill: Bill) -> Reply:
        """The reply from the journal if it is there, or else a new reply. Raises what `_repeat` raises."""
        key = call_key(member.source, messages, caller)
        # If games make the same call at once, the first one pays, and the others find its reply in the
        # journal.
        async with self._lock_of(key):
            if recorded := self.journal.replies.get(key):
                member.counts["reused"] += 1
                member.note_reply(recorded)
                return recorded
            call = Call(member, messages, caller, bill, key, number=next(self.journal.numbers))
            member.counts["paid"] += 1
            async with member.slots:
                return await self._repeat(call)

    async def _repeat(self, call: Call) -> Reply:
        """Send the request of a call until there is a reply, for at most CALL_DEADLINE seconds.

        Raises Refused or EnvError if the call failed, and what `_request` raises before a request.
        """
        member = call.member
        loop = asyncio.get_running_loop()
        begin = loop.time()
        failures = without_text = 0
        wait = 0.0
        while True:
            await self._pause(member, wait)
            try:
                return await self._request(call, failures=failures)
            except Busy as busy:
                failures += 1
                if isinstance(busy, NoText):
                    without_text += 1
                if without_text == MAX_EMPTY_RESPONSES:
                    raise Refused(
                        f"{MAX_EMPTY_RESPONSES} responses without a reply, the last: {busy.reason}"
                    ) from None
                wait = back_off(failures) if busy.wait is None else busy.wait
                if loop.time() - begin + wait > CALL_DEADLINE:
                    raise EnvError(
                        f"{member.source.name} did not reply: in {CALL_DEADLINE:g} s, the last problem: "
                        f"{busy.reason}"
                    ) from None
                self._note_wait(member, busy, wait)

    async def _pause(self, member: Member, wait: float) -> None:
        """Sleep for `wait` seconds, and until the server accepts calls again."""
        loop = asyncio.get_running_loop()
        wait = max(wait, member.paused_until - loop.time())
        while wait > 0:
            paused_until = member.paused_until
            await self._sleep(wait)
            # Meanwhile, in its response to another call, the server may have asked for a longer pause.
            if member.paused_until == paused_until:
                break
            wait = member.paused_until - loop.time()

    async def _request(self, call: Call, *, failures: int = 0) -> Reply:
        """Send one request of a call, after `failures` requests that got no reply.

        The estimated cost is reserved in the budget, and written to the journal before the request is sent.
        However the request ends, budget, journal and bill are then charged with what it may have cost.
        Raises OutOfBudget or LimitReached before a request that does not fit, and what the source's attempt
        raises.
        """
        member, source, counts = call.member, call.member.source, call.member.counts
        self.journal.check_room()
        estimate = await self.budget.reserve(call.estimate)
        cost_if_lost = estimate + Spending(lost_usd=estimate.usd)
        # The cost stays None if the request is cancelled, or if it gets no reply but may be billed. Then it
        # counts as lost.
        cost: Spending | None = None
        reply: Reply | None = None
        try:
            self.journal.write(call.number, call.key, call.charged + cost_if_lost)
            reply = await source.attempt(call.messages, call.caller, failures=failures)
            cost = member.price.of_call(reply.tokens_in, reply.tokens_out)
        except Busy as busy:
            if not busy.may_be_billed:
                cost = Spending()
            raise
        except (Refused, EnvError):
            cost = ONE_FREE_CALL
            raise
        finally:
            if reply is None:
                counts["failed_requests"] += 1
            if cost is None:
                counts["lost"] += 1
                cost = cost_if_lost
            self.budget.settle(estimate, cost)
            call.charged += cost
            call.bill.charged_usd += cost.usd
            prompt = call.messages[-1]["content"]
            self.journal.write(call.number, call.key, call.charged, reply, source=source.name, prompt=prompt)
        member.note_reply(reply)
        counts["tokens_in"] += reply.tokens_in
        counts["tokens_out"] += reply.tokens_out
        return reply

    async def check(self) -> list[Checked]:
        """Find a wrong URL, key, model or setting within a few seconds. A slow or busy endpoint passes.

        Returns what was learned about each source. The other ranks of a run pass it to `apply`, and do not
        check. Raises UsageError or FatalEnvError if no call can succeed.
        """
        for member in self.members:
            if member.source.needs_check:
                try:
                    await self._check(member)
                finally:
                    await member.source.close()  # Games may be played in another event loop.
                member.counts.clear()  # The metrics count the calls of games.
        learned = [
            Checked(member.has_replied, member.longest_reply, member.source.left_out)
            for member in self.members
        ]
        self.apply(learned)
        return learned

    def apply(self, learned: Sequence[Checked]) -> None:
        """Take over what a check has learned about each source, before the first game."""
        for member, checked in zip(self.members, learned, strict=True):
            member.has_replied = checked.has_replied
            member.longest_reply = checked.longest_reply
            for field_name in checked.left_out:
                member.source.leave_out(field_name)
            member.open_slots()  # Without `max_tokens`, there may be fewer than before.

    async def _check(self, member: Member) -> None:
        """Send one request, and charge it. Its reply is not used again: the next start checks again."""
        source, number = member.source, next(self.journal.numbers)
        messages = [Message(role="user", content="Hi")]
        call = Call(member, messages, NO_GAME, Bill(), f"check {number}", number)
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                reply = await self._request(call)
        except OutOfBudget:
            return  # A run that plays from its journal may need no more calls.
        except TimeoutError:
            logger.warning("%s takes over %g s to reply", source, CHECK_SECONDS)
            return
        except (NoText, NoServer) as problem:
            raise FatalEnvError(f"{source} cannot be used: {problem.reason}") from None
        except Busy as busy:
            logger.warning("%s is busy: %s", source, busy.reason)
            return
        except Refused as refused:
            advice = ""
            if refused.status in (400, 422) and source.parameters.get("system"):
                advice = ' (if the model takes no system message, give --env-system "")'
            raise FatalEnvError(f"{source} cannot be used: {refused.reason}{advice}") from None
        if not reply.text.strip():
            said = reply.reason or reply.label
            raise UsageError(
                f'{source} replied to "Hi" without any text ({said}): check max_tokens and the other fields '
                "of --env-args, or choose another model"
            )

    async def close(self) -> None:
        """Close the connections. Another call opens new ones."""
        for member in self.members:
            await member.source.close()

    def take_metrics(self) -> dict[str, float]:
        """Return what was counted since the last call of this method.

        The sums over all environments are env/NAME. Of several environments, each also has its own counts,
        env/NUMBER:ENVIRONMENT/NAME. Labelled replies are counted as env/outcomes/LABEL.
        """
        totals = Counter(dict.fromkeys(COUNTED, 0))
        for member in self.members:
            totals.update(member.counts)
        del totals["errors"]  # The games count their failed calls.
        metrics = {f"env/{name}": float(count) for name, count in totals.items()}
        for number, member in enumerate(self.members, start=1):
            if len(self.members) > 1:
                for name in COUNTED:
                    metrics[f"env/{number}:{member.source.name}/{name}"] = float(member.counts[name])
            member.counts.clear()
        return metrics

    def _lock_of(self, key: str) -> AbstractAsyncContextManager[object]:
        """The lock of a call. Without a journal, equal calls do not wait for each other: each one pays."""
        if not self.journal.records:
            return nullcontext()
        return self._locks.setdefault(key, asyncio.Lock())

    def _note_wait(self, member: Member, busy: Busy, wait: float) -> None:
        """Let all calls wait if the server asked for it, and report a long wait."""
        if busy.wait:
            member.paused_until = max(member.paused_until, asyncio.get_running_loop().time() + busy.wait)
        if wait > SILENT_SECONDS and not member.is_wait_reported:
            member.is_wait_reported = True
            logger.warning("waiting for %s: %s", member.source, busy.reason)

    def _watch(self, *, failed: bool, reason: str = "") -> None:
        """Record how a call ended. Many failed calls are warned of once; too many raise Resumable."""
        self._recent.append(failed)
        made, failures = len(self._recent), sum(self._recent)
        share = failures / max(made, MIN_CALLS)
        shown = f"{failures} of the last {made} calls of {self.name} failed"
        if failed:
            shown += f", this one: {reason}"
        if failed and share > STOP_ABOVE:
            raise Resumable(shown)
        is_alarming = share > WARN_ABOVE
        if is_alarming and not self._warned:
            logger.warning("%s", shown)
        self._warned = is_alarming


def error_of_call(member: Member, problem: EnvError | Refused) -> Exception:
    """The error for a call that failed: EnvError ends its game, FatalEnvError and Resumable end the run."""
    if isinstance(problem, EnvError):
        return problem
    name = member.source.name
    if not member.has_replied:
        return FatalEnvError(f"{name} cannot be used: {problem.reason}")
    if problem.concerns_all:
        return Resumable(f"{name} accepts no calls any more: {problem.reason}")
    return EnvError(f"{name} refused the dialogue: {problem.reason}")


def back_off(failures: int) -> float:
    """Seconds to wait after this many failures: exponential back-off with full jitter."""
    longest = min(MAX_BACK_OFF, MIN_BACK_OFF * 2.0 ** min(failures - 1, 10))
    return random.uniform(0, longest)


def parse_weights(route: str, count: int) -> list[float]:
    """The weight of each of `count` environments in a route. Raises UsageError. Routes:

        session   draw an environment for each question
        uniform   draw an environment for each question anew in each epoch, all with the same probability
        3,1,…     like uniform, with these weights

    All games of a group ask the same environment (eqs 18-19), because training compares them. So a game is
    never moved to another environment. A resumed run draws the same environments again.
    """
    if route in ("session", "uniform"):
        return [1.0] * count
    try:
        weights = [float(part) for part in route.split(",")]
    except ValueError:
        weights = []
    if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise UsageError(f"--route takes session, uniform or {count} weights (such as 3,1), not {route!r}")
    return weights
