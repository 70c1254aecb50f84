"""One environment with its journal, budget and counts."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from statistics import median

from prompt_r1.endpoint.responses import Outcome, reply_of, without_thinking
from prompt_r1.environments.budget import BILLED_CHARACTERS_PER_TOKEN, Budget, Price
from prompt_r1.environments.journal import Call, Journal
from prompt_r1.environments.sources import FreeSource, ReplySource
from prompt_r1.errors import UsageError
from prompt_r1.spending import Spending
from prompt_r1.types import Message

LONG_REPLY = 1024  # tokens reserved for the first reply where the request sets no limit
FRAME_CHARACTERS = 20  # of a message's role and markers


@dataclass(frozen=True)
class Reply:
    """The text of a reply and its cost, whether it was paid now or came from the journal."""

    text: str
    spent: Spending


class MeteredEnvironment:
    """Looks a call up in the journal, else reserves budget, calls the source and records the outcome."""

    def __init__(
        self,
        source: ReplySource,
        *,
        journal: Journal,
        budget: Budget,
        price: Price,
        keeps_thinking: bool = False,
        samples: bool = False,
    ) -> None:
        """`keeps_thinking`: the agent reads the <think> blocks of replies too. `samples`: equal messages may
        have other replies, so each epoch gets its own.
        """
        self.name = source.name
        self._source = source
        self._journal = journal
        self._budget = budget
        self._price = price
        self._keeps_thinking = keeps_thinking
        self._samples = samples
        self._by_session = isinstance(source, FreeSource) and source.by_session
        # Since `take_counts`, which evaluations never call:
        self._spent, self._reused, self._errors = Spending(), 0, 0
        self._latencies: deque[float] = deque(maxlen=10_000)  # seconds, of the last calls
        self._running: dict[str, asyncio.Event] = {}  # calls that are being paid for, by key
        self._longest_reply = 0  # tokens

    async def call(
        self, messages: list[Message], *, sample: int = 0, session: str = "", epoch: int = 0
    ) -> Reply:
        """Return the reply. Raises EnvError, FatalEnvError, and Resumable when the budget is used up.

        When the call is cancelled, the attempts that were sent are counted as lost.
        """
        epoch = epoch if self._samples else 0
        call = Call(
            self.name, messages, self._source.parameters, sample, session, epoch, by_session=self._by_session
        )
        outcome = await self._find_or_pay(call)
        spent = self._price.of_call(outcome.tokens_in, outcome.tokens_out)
        read = outcome if self._keeps_thinking else without_thinking(outcome)
        return Reply(reply_of(read, self.name), spent)

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError if no call can succeed. A replay calls nothing, and passes."""
        if self._journal.mode != "replay":
            await self._source.check()

    def take_counts(self) -> dict[str, float]:
        """Calls, lost attempts, tokens and median latency since the last call of this method."""
        counts = {
            "paid": self._spent.calls,
            "lost": self._spent.lost_calls,
            "reused": self._reused,
            "errors": self._errors,
            "tokens_in": self._spent.tokens_in,
            "tokens_out": self._spent.tokens_out,
            "latency": median(self._latencies) if self._latencies else 0.0,
        }
        self._spent, self._reused, self._errors = Spending(), 0, 0
        self._latencies.clear()
        return {name: float(count) for name, count in counts.items()}

    async def _find_or_pay(self, call: Call) -> Outcome:
        if not self._journal.reuses:
            return await self._pay(call)
        while call.key in self._running:
            await self._running[call.key].wait()  # another game makes the same call: pay for it once
        outcome = self._journal.find(call)
        if outcome is not None:
            self._reused += 1
            return outcome
        if self._journal.mode == "replay":
            raise UsageError(
                f"--journal replay: {self.name} has no recorded reply to call {len(call.messages) // 2 + 1} "
                f"of game {call.sample} about question {call.session!r}; record it with --journal reuse"
            )
        self._running[call.key] = asyncio.Event()
        try:
            return await self._pay(call)
        finally:
            self._running.pop(call.key).set()

    async def _pay(self, call: Call) -> Outcome:
        estimate, spent = self.estimate(call.messages), Spending()
        await self._budget.reserve(estimate)
        begin = time.perf_counter()
        try:
            outcome = await self._source.call(call.messages, sample=call.sample, session=call.session)
            reply = self._price.of_call(outcome.tokens_in, outcome.tokens_out)
            spent = reply + _lost(estimate, outcome.lost)
            self._record(call, outcome, spent, latency=time.perf_counter() - begin)
        except asyncio.CancelledError as cancelled:
            # EndpointClient.send says how many attempts; other sources have one.
            lost = next((count for count in cancelled.args if isinstance(count, int)), 1)
            spent = _lost(estimate, lost)
            outcome = Outcome("retry", reason="the call was cancelled", lost=lost)
            self._record(call, outcome, spent, latency=time.perf_counter() - begin)
            raise
        finally:
            self._budget.settle(estimate, spent)
        return outcome

    def _record(self, call: Call, outcome: Outcome, spent: Spending, *, latency: float) -> None:
        """Count a call, and write it to the journal unless it was cancelled before it was sent."""
        self._spent += spent
        self._errors += outcome.verdict in ("retry", "fatal")
        if spent.calls:
            self._latencies.append(latency)
            self._longest_reply = max(self._longest_reply, outcome.tokens_out)
        if spent.calls or spent.lost_calls:
            self._journal.write(call, outcome, spent=spent, latency=latency)

    def estimate(self, messages: list[Message]) -> Spending:
        """Estimate the cost of a call from above.

        It is too low only where the request sets no limit and the reply is longer than all before it.
        """
        parameters = self._source.parameters
        characters = len(str(parameters))
        characters += sum(len(message["content"]) + FRAME_CHARACTERS for message in messages)
        limit = parameters.get("max_tokens") or parameters.get("max_completion_tokens")
        reply = limit if isinstance(limit, int) else self._longest_reply or LONG_REPLY
        return self._price.of_call(characters // BILLED_CHARACTERS_PER_TOKEN, reply)


def _lost(estimate: Spending, attempts: int) -> Spending:
    """What attempts without a reply may have cost, from above."""
    return Spending(
        lost_calls=attempts, lost_tokens=attempts * estimate.tokens, lost_usd=attempts * estimate.usd
    )
