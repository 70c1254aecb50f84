"""One or several environments behind `ask`.

`Environment.ask` draws the environment of the question; `_call` looks into the journal, and repeats the
request within the budget until there is a reply; the source makes each attempt (endpoint.py over HTTP,
local.py and sources.py in this process).

    session   draw an environment for each question
    uniform   draw one for each question anew in each epoch, all with the same probability
    3,1,…     the same with these weights

All games of a group ask one environment (eqs 18-19), because training compares them: a game is never moved to
another one. A resumed run draws the same.
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from prompt_r1.environments.budget import Budget, OutOfBudget, Price
from prompt_r1.environments.journal import Journal, call_key
from prompt_r1.environments.sources import Busy, Caller, NoServer, NoText, Refused, Reply, Source
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.types import Message, Spending

logger = logging.getLogger(__name__)

# Estimates of what is billed. They are high, because a budget may end early, but not late.
BILLED_CHARACTERS_PER_TOKEN = 3
LONG_REPLY = 1024  # tokens: the least that is reserved for a reply where the request sets no limit
FRAME_CHARACTERS = 20  # a message's role and markers
FIRST_AT_ONCE = 4  # requests that run at first where nothing bounds what their replies cost

CALL_DEADLINE = 600.0  # seconds in which a call repeats its request
MOST_WITHOUT_TEXT = 6  # responses without a reply, which are billed, in one call
FIRST_BACK_OFF, LONGEST_BACK_OFF = 0.5, 30.0  # seconds
SILENT_SECONDS = 10.0  # a longer wait is reported, once in each outage
CHECK_SECONDS = 5.0

FREE = Price()
UNBILLED = Spending(calls=1)  # a call that the source answered without a reply
# Failure rates are over the last 200 calls. Fewer than 100 calls count as 100, so that one early failure
# raises no alarm.
WATCHED, LEAST_WATCHED = 200, 100
WARN_ABOVE, STOP_ABOVE = 0.05, 0.20  # shares of failed calls
COUNTED = ("paid", "failed_requests", "lost", "reused", "errors", "tokens_in", "tokens_out")


@dataclass(eq=False)
class Member:
    """One source with its price, its counts, and what is known about it."""

    source: Source
    price: Price
    slots: asyncio.Semaphore  # attempts that may run
    open_slots: int  # their number; with each reply there is one more, up to the source's concurrency
    has_replied: bool = False
    longest_reply: int = 0  # tokens
    paused_until: float = 0.0  # loop time; the server asked for no calls before
    reported: bool = False  # that we wait for it
    counts: Counter[str] = field(default_factory=Counter)  # since `take_metrics`

    def estimate(self, messages: list[Message]) -> Spending:
        """Estimate the cost of a request from above.

        It is too low only where the request sets no limit and the reply is longer than all before it.
        """
        characters = len(str(self.source.parameters))
        characters += sum(len(message["content"]) + FRAME_CHARACTERS for message in messages)
        limit = reply_limit(self.source)
        longest = max(LONG_REPLY, self.longest_reply) if limit is None else limit
        return self.price.of_call(characters // BILLED_CHARACTERS_PER_TOKEN, longest)

    def learn(self, reply: Reply) -> None:
        """Note that the source replies, and how much it writes."""
        self.has_replied = True
        self.reported = False
        self.longest_reply = max(self.longest_reply, reply.tokens_out)
        if self.open_slots < self.source.concurrency:
            self.open_slots += 1
            self.slots.release()


class Environment:
    """One or several sources behind `ask`. Raises UsageError for a route that does not match their number."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        journal: Journal | None = None,
        budget: Budget | None = None,
        price: Price = FREE,
        route: str = "session",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = ",".join(source.name for source in sources)
        self.budget = budget or Budget()
        self.journal = journal or Journal(None)
        self.members: list[Member] = []
        for source in sources:
            at_once = source.concurrency
            if self.budget.limits_usd and reply_limit(source) is None:
                at_once = min(at_once, FIRST_AT_ONCE)  # until their replies show what they cost
            self.members.append(Member(source, price, asyncio.Semaphore(at_once), at_once))
        self._route = route
        self._weights = parse_weights(route, len(sources))
        self._sleep = sleep
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # by the keys of the calls that are made now
        self._recent: deque[bool] = deque(maxlen=WATCHED)  # whether each of the last calls failed
        self._warned = False

    async def ask(self, messages: list[Message], caller: Caller | None = None) -> str:
        """Return the reply of the environment of the caller's question; without a caller, of no question.

        Raises EnvError if the call failed, FatalEnvError when none can succeed, and Resumable when the budget
        is used up, when the endpoint accepts no calls any more, or for a failed call after too many others.
        """
        caller = caller or Caller()
        drawn_by = caller.question if self._route == "session" else f"{caller.question}/{caller.epoch}"
        member = random.Random(drawn_by).choices(self.members, self._weights)[0]
        name = member.source.name
        try:
            reply = await self._call(member, messages, caller)
        except EnvError as error:
            caller.spent += UNBILLED
            member.counts.update(paid=1, errors=1)
            self._watch(failed=True, reason=str(error))
            raise
        except Refused as refused:
            caller.spent += UNBILLED
            member.counts.update(paid=1, errors=1)
            if not member.has_replied:
                raise FatalEnvError(f"{name} cannot be used: {refused.reason}") from None
            if refused.concerns_all:
                raise Resumable(f"{name} accepts no calls any more: {refused.reason}") from None
            reason = f"{name} refused the dialogue: {refused.reason}"
            self._watch(failed=True, reason=reason)
            raise EnvError(reason) from None
        self._watch(failed=False)
        if reply.label:
            member.counts[f"outcomes/{reply.label}"] += 1
        caller.spent += member.price.of_call(reply.tokens_in, reply.tokens_out)
        caller.finish = reply.finish
        return reply.text

    async def _call(self, member: Member, messages: list[Message], caller: Caller) -> Reply:
        """The reply to a call: recorded, or paid for.

        Each request is reserved in the budget, and written to the journal before it is sent. Whatever ends
        it, what it may cost is charged. Raises Refused, and what `ask` raises.
        """
        source, counts = member.source, member.counts
        key = call_key(source, messages, caller)
        # Of games that make the same call at once, one pays, and the others find its reply in the journal.
        async with self._lock_of(key):
            if recorded := self.journal.replies.get(key):
                counts["reused"] += 1
                member.learn(recorded)
                return recorded
            call, charged = next(self.journal.numbers), Spending()
            shown = {"source": source.name, "prompt": messages[-1]["content"]}
            failures = without_text = 0
            wait = 0.0
            async with member.slots:
                loop = asyncio.get_running_loop()
                begin = loop.time()
                while True:
                    wait = max(wait, member.paused_until - loop.time())
                    if wait > 0:
                        await self._sleep(wait)
                    estimate = await self.budget.reserve(partial(member.estimate, messages))
                    cost, is_lost = lost(estimate), True  # a request that is cut off may be billed
                    reply: Reply | None = None
                    try:
                        self.journal.write(call, key, charged + estimate)
                        reply = await source.attempt(messages, caller)
                        cost = member.price.of_call(reply.tokens_in, reply.tokens_out)
                    except Busy as error:
                        busy = error
                        if not busy.may_be_billed:
                            cost, is_lost = Spending(), False
                    except (Refused, EnvError):
                        cost, is_lost = UNBILLED, False
                        raise
                    finally:
                        self.budget.settle(estimate, cost)
                        charged += cost
                        self.journal.write(call, key, charged, reply, **shown)
                        if reply is None:
                            counts.update(failed_requests=1, lost=is_lost)
                    if reply is not None:
                        member.learn(reply)
                        counts.update(paid=1, tokens_in=reply.tokens_in, tokens_out=reply.tokens_out)
                        return reply
                    failures += 1
                    if isinstance(busy, NoText):
                        without_text += 1
                        if without_text == MOST_WITHOUT_TEXT:
                            raise Refused(
                                f"{MOST_WITHOUT_TEXT} responses without a reply, the last: {busy.reason}"
                            )
                    wait = back_off(failures) if busy.wait is None else busy.wait
                    if loop.time() - begin + wait > CALL_DEADLINE:
                        break
                    self._note_wait(member, busy, wait)
        raise EnvError(
            f"{source.name} did not reply: in {CALL_DEADLINE:g} s, the last problem: {busy.reason}"
        )

    async def check(self) -> None:
        """Find a wrong URL, key, model or setting within a few seconds; a slow or busy endpoint passes.

        Raises UsageError or FatalEnvError if no call can succeed.
        """
        for member in self.members:
            if not member.source.needs_check:
                continue
            try:
                await self._check(member)
            finally:
                await member.source.close()  # games may be played in another event loop

    async def _check(self, member: Member) -> None:
        """Send one request. It is charged, but its reply is not recorded: the next start checks again."""
        source, messages = member.source, [Message(role="user", content="Hi")]
        try:
            estimate = await self.budget.reserve(partial(member.estimate, messages))
        except OutOfBudget:
            return  # a run that plays from its journal needs no more calls
        cost, reply = lost(estimate), None
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                reply = await source.attempt(messages, Caller())
            cost = member.price.of_call(reply.tokens_in, reply.tokens_out)
        except TimeoutError:
            logger.warning("%s takes over %g s to reply", source, CHECK_SECONDS)
        except (NoText, NoServer) as problem:
            cost = lost(estimate) if problem.may_be_billed else Spending()
            raise FatalEnvError(f"{source} cannot be used: {problem.reason}") from None
        except Busy as busy:
            cost = lost(estimate) if busy.may_be_billed else Spending()
            logger.warning("%s is busy: %s", source, busy.reason)
        except Refused as refused:
            cost = UNBILLED
            advice = ""
            if refused.status in (400, 422) and source.parameters.get("system"):
                advice = ' (if the model takes no system message, give --env-system "")'
            raise FatalEnvError(f"{source} cannot be used: {refused.reason}{advice}") from None
        finally:
            self.budget.settle(estimate, cost)
            self.journal.write(next(self.journal.numbers), "check", cost)
        if reply is None:
            return
        member.has_replied = True
        if not reply.text.strip():
            said = reply.reason or reply.label
            raise UsageError(
                f'{source} replied to "Hi" without any text ({said}): check max_tokens and the other fields '
                "of --env-args, or choose another model"
            )

    async def close(self) -> None:
        """Close connections; another call opens them again."""
        for member in self.members:
            await member.source.close()

    def most_usd(self, messages: list[Message]) -> float:
        """The estimate from above of what a request with these messages costs, in dollars."""
        return max(member.estimate(messages).usd for member in self.members)

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call of this method.

        The sums are env/NAME; with several environments, the counts of each are env/NUMBER:ENVIRONMENT/NAME.
        Replies without ordinary text are counted by label, as env/outcomes/LABEL.
        """
        totals = sum((member.counts for member in self.members), Counter[str]())
        # Without errors, which the games count.
        metrics = {f"env/{n}": float(totals[n]) for n in dict.fromkeys((*COUNTED, *totals)) if n != "errors"}
        for number, member in enumerate(self.members, start=1):
            if len(self.members) > 1:
                place = f"env/{number}:{member.source.name}"
                metrics |= {f"{place}/{name}": float(member.counts[name]) for name in COUNTED}
            member.counts.clear()
        return metrics

    def _lock_of(self, key: str) -> AbstractAsyncContextManager[object]:
        """The lock of a call. Without a journal, equal calls are made several times."""
        if not self.journal.records:
            return nullcontext()
        return self._locks.setdefault(key, asyncio.Lock())

    def _note_wait(self, member: Member, busy: Busy, wait: float) -> None:
        """Let all calls wait if the server asked for it, and report a long wait."""
        if busy.wait:
            member.paused_until = max(member.paused_until, asyncio.get_running_loop().time() + busy.wait)
        if wait > SILENT_SECONDS and not member.reported:
            member.reported = True
            logger.warning("waiting for %s: %s", member.source, busy.reason)

    def _watch(self, *, failed: bool, reason: str = "") -> None:
        """Record how a call ended. Raises Resumable for too many failed ones; before, warns of them once."""
        self._recent.append(failed)
        made, count = len(self._recent), sum(self._recent)
        shown = f"{count} of the last {made} calls of {self.name} failed"
        shown += f", this one: {reason}" if failed else ""
        if failed and count > STOP_ABOVE * max(made, LEAST_WATCHED):
            raise Resumable(shown)
        alarming = count > WARN_ABOVE * max(made, LEAST_WATCHED)
        if alarming and not self._warned:
            logger.warning("%s", shown)
        self._warned = alarming


def reply_limit(source: Source) -> int | None:
    """The most tokens of a reply, if the request sets a limit."""
    limit = source.parameters.get("max_tokens") or source.parameters.get("max_completion_tokens")
    return limit if isinstance(limit, int) else None


def lost(estimate: Spending) -> Spending:
    """The charge of a request without a reply that may be billed."""
    return estimate + Spending(lost_usd=estimate.usd)


def back_off(failures: int) -> float:
    """Seconds to wait after this many failures: exponential back-off with full jitter."""
    longest = min(LONGEST_BACK_OFF, FIRST_BACK_OFF * 2.0 ** min(failures - 1, 10))
    return random.uniform(0, longest)


def parse_weights(route: str, count: int) -> list[float]:
    """The weights of the environments in a route. Raises UsageError."""
    if route in ("session", "uniform"):
        return [1.0] * count
    try:
        weights = [float(part) for part in route.split(",")]
    except ValueError:
        weights = []
    if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise UsageError(f"--route takes session, uniform or {count} weights (such as 3,1), not {route!r}")
    return weights
