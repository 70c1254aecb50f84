"""One or several environments: every call goes journal → budget → source.

`Environment.ask` looks into the journal (journal.py); a `Payment` reserves each request in the budget
(spending.py) and writes it to the journal; the source sends it (client.py, or sources.py in this process).

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
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.journal import Journal, Key
from prompt_r1.environments.sources import Call, Outcome, Source, without_thinking
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.types import Message, Spending

logger = logging.getLogger(__name__)

# Estimates of what is billed. From above, because a budget may end early, but not late.
BILLED_CHARACTERS_PER_TOKEN = 3
LONG_REPLY = 1024  # tokens reserved for the first reply where the request sets no limit
FRAME_CHARACTERS = 20  # of a message's role and markers

FREE = Price()
WATCHED, LEAST_WATCHED = 200, 100  # most recent calls; of fewer, shares are taken as if there were so many
WARN_ABOVE, STOP_ABOVE = 0.05, 0.20  # shares of failed calls
COUNTED = ("paid", "failed_requests", "lost", "reused", "errors", "tokens_in", "tokens_out")


@dataclass
class Caller:
    """Whose call it is, and what the replies of the game cost, paid now or earlier.

    A resumed run plays games from the journal again, and must reward them the same.
    """

    question: str = ""  # its id
    sample: int = 0  # number of the game among those of its question
    epoch: int = 0  # of training
    spent: Spending = field(default_factory=Spending)
    finish: str = ""  # why the last reply ended: "length" if it was cut by a limit of tokens


@dataclass
class Member:
    """One source with its price and counts."""

    source: Source
    price: Price
    has_replied: bool = False
    counts: Counter[str] = field(default_factory=Counter)  # since `take_metrics`
    longest_reply: int = 0  # tokens

    def estimate(self, messages: list[Message]) -> Spending:
        """Estimate the cost of a request from above.

        It is too low only where the request sets no limit and the reply is longer than all before it.
        """
        parameters = self.source.parameters
        characters = len(str(parameters))
        characters += sum(len(message["content"]) + FRAME_CHARACTERS for message in messages)
        limit = parameters.get("max_tokens") or parameters.get("max_completion_tokens")
        reply = limit if isinstance(limit, int) else self.longest_reply or LONG_REPLY
        return self.price.of_call(characters // BILLED_CHARACTERS_PER_TOKEN, reply)


class Payment:
    """The requests of one call: each is reserved, and written to the journal, before it is sent."""

    def __init__(self, member: Member, key: Key, journal: Journal, budget: Budget) -> None:
        self._member, self._key, self._journal, self._budget = member, key, journal, budget
        self._estimate = member.estimate(key.messages)
        self._call = next(journal.numbers)
        self._reserved = Spending()  # for the request that runs
        self._charged = Spending()  # for those before it

    async def begin(self) -> None:
        """Reserve the next request. Raises OutOfBudget."""
        assert not self._reserved.calls, "one request of a call at a time"
        await self._budget.reserve(self._estimate)
        self._reserved = self._estimate
        self._journal.write(self._call, self._key, self._charged + self._estimate)

    def give_up(self, lost: bool) -> None:
        """A request brought no reply. One that may be billed is charged at its estimate."""
        if self._reserved.calls:
            self._member.counts.update(failed_requests=1, lost=lost)
            self._settle(self._estimate + Spending(lost_usd=self._estimate.usd) if lost else Spending())

    def end(self, outcome: Outcome) -> None:
        """Charge the reply; of a call that failed, only its lost requests, or else a call without tokens."""
        member, tokens_in, tokens_out = self._member, outcome.tokens_in, outcome.tokens_out
        member.has_replied |= outcome.replied
        member.longest_reply = max(member.longest_reply, tokens_out)
        member.counts.update(paid=1, errors=not outcome.replied, tokens_in=tokens_in, tokens_out=tokens_out)
        is_charged = outcome.replied or not self._charged.calls
        self._settle(member.price.of_call(tokens_in, tokens_out) if is_charged else Spending(), outcome)

    def _settle(self, charge: Spending, ended: Outcome | None = None) -> None:
        self._budget.settle(self._reserved, charge)
        self._reserved = Spending()
        self._charged += charge
        self._journal.write(self._call, self._key, self._charged, ended)


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
    ) -> None:
        self.name = ",".join(source.name for source in sources)
        self.members = [Member(source, price) for source in sources]
        self.budget = budget or Budget()
        self.journal = journal or Journal(None)
        self._route = route
        self._weights = parse_weights(route, len(sources))
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # of the calls that are made now, by key
        self._recent: deque[bool] = deque(maxlen=WATCHED)  # whether each of the last calls failed
        self._warned = False

    async def ask(self, messages: list[Message], caller: Caller | None = None) -> str:
        """Return the reply of the environment of the caller's question; without a caller, of no question.

        Raises EnvError if the call failed, FatalEnvError when none can succeed, and Resumable when the budget
        is used up, or for a failed call after too many others.
        """
        caller = caller or Caller()
        drawn_by = caller.question if self._route == "session" else f"{caller.question}/{caller.epoch}"
        member = random.Random(drawn_by).choices(self.members, self._weights)[0]
        outcome = await self._outcome_of(member, messages, caller)
        reason = outcome.reason
        if outcome.verdict == "refused":
            if not member.has_replied:
                raise FatalEnvError(f"{member.source.name} cannot be used: {reason}")
            reason = f"{member.source.name} refused the dialogue: {reason}"
        self._watch(failed=not outcome.replied, reason=reason)
        if not outcome.replied:
            raise EnvError(reason)
        return outcome.text

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError if no call can succeed."""
        for member in self.members:
            await member.source.check(partial(self._outcome_of, member, caller=Caller("check")))

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

    async def _outcome_of(self, member: Member, messages: list[Message], caller: Caller) -> Outcome:
        """The outcome of a call, recorded or paid for, without the thinking in its text."""
        source = member.source
        asked_by: list[object] = [caller.sample, caller.epoch] if source.samples else []
        if source.by_session:
            asked_by.append(caller.question)
        key = Key(source.name, source.parameters, messages, asked_by)
        # Of games that make the same call at once, one pays, and the others find its reply in the journal.
        lock = self._locks.setdefault(key.digest, asyncio.Lock()) if self.journal.records else nullcontext()
        async with lock:
            outcome = self.journal.replies.get(key.digest)
            if outcome is not None:
                member.counts["reused"] += 1
                member.has_replied = True
            else:
                outcome = await self._pay(member, key, caller)
        outcome = without_thinking(outcome)
        if outcome.label:
            member.counts[f"outcomes/{outcome.label}"] += 1
        caller.spent += member.price.of_call(outcome.tokens_in, outcome.tokens_out)
        caller.finish = outcome.finish
        return outcome

    async def _pay(self, member: Member, key: Key, caller: Caller) -> Outcome:
        """Send a call: whatever ends it, what it may cost is charged."""
        payment = Payment(member, key, self.journal, self.budget)
        call = Call(key.messages, caller.sample, caller.question, payment.begin, payment.give_up)
        try:
            outcome = await member.source.reply(call)
        except EnvError as error:
            outcome = Outcome("failed", reason=str(error))
        except BaseException:
            payment.give_up(lost=True)  # the call was cut off: a request that runs is lost
            raise
        payment.end(outcome)
        return outcome

    def _watch(self, *, failed: bool, reason: str) -> None:
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
