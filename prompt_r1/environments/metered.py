"""One environment with its journal, its budget and its counts, between a game and a provider."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from prompt_r1.endpoint.responses import Outcome, reply_of
from prompt_r1.environments.budget import BILLED_CHARACTERS_PER_TOKEN, Budget, Price, Spending
from prompt_r1.environments.journal import Call, Journal
from prompt_r1.errors import UsageError
from prompt_r1.types import Environment, Message

LONG_REPLY = 1024  # tokens reserved for the first reply where the request sets no limit
FRAME_CHARACTERS = 20  # of a message's role and markers


@dataclass(frozen=True)
class Reply:
    """The text of a reply and its cost, whether it was paid now or came from the journal."""

    text: str
    tokens_in: int
    tokens_out: int
    usd: float


class ReplySource(Protocol):
    """Something that replies. `parameters` is everything that shapes a reply besides messages and sample."""

    name: str
    parameters: Mapping[str, object]

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome: ...

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError if no call can succeed."""

    async def close(self) -> None: ...


class FreeSource:
    """An environment in this process as a source, without failures.

    It costs nothing unless a token is taken to have so many characters.
    """

    def __init__(
        self, environment: Environment, *, seed: int, characters_per_token: float = math.inf
    ) -> None:
        self.name = environment.name
        self._characters_per_token = characters_per_token
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._environment = environment

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        text = await self._environment.ask(messages)
        tokens_in = self._tokens(sum(len(message["content"]) for message in messages))
        return Outcome(
            "ok", text=text, finish="stop", tokens_in=tokens_in, tokens_out=self._tokens(len(text))
        )

    def _tokens(self, characters: int) -> int:
        return math.ceil(characters / self._characters_per_token)

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        await self._environment.close()


class MuteEnvironment:
    """Gives every prompt the same reply, without information: the ablations without an environment."""

    def __init__(self, name: str = "nobody") -> None:
        self.name = name

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        return "I have nothing to say about this."

    async def close(self) -> None:
        pass


class MeteredEnvironment:
    """Looks a call up in the journal, else reserves budget, calls the source and records the outcome."""

    def __init__(self, source: ReplySource, *, journal: Journal, budget: Budget, price: Price) -> None:
        self.name = source.name
        self._source = source
        self._journal = journal
        self._budget = budget
        self._price = price
        self._counts: Counter[str] = Counter()
        # Seconds, of the last calls since `take_counts`, which evaluations never call.
        self._latencies: deque[float] = deque(maxlen=10_000)
        self._running: dict[str, asyncio.Event] = {}  # calls that are being paid for, by key
        self._longest_reply = 0  # tokens

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Reply:
        """Return the reply. Raises EnvError, FatalEnvError, and Resumable when the budget is used up.

        When the call is cancelled, the attempts that were sent are counted as lost.
        """
        call = Call(self.name, messages, self._source.parameters, sample, session)
        outcome = await self._find_or_pay(call)
        cost = self._price.of_call(outcome.tokens_in, outcome.tokens_out)
        return Reply(reply_of(outcome, self.name), outcome.tokens_in, outcome.tokens_out, cost.usd)

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError if no call can succeed. A replay calls nothing, and passes."""
        if self._journal.mode != "replay":
            await self._source.check()

    async def close(self) -> None:
        await self._source.close()

    def most_usd(self, messages: list[Message]) -> float:
        """The estimate from above of what a call with these messages costs, in dollars."""
        return self._estimate(Call(self.name, messages, self._source.parameters, 0, "")).usd

    def take_counts(self) -> dict[str, float]:
        """Calls, lost attempts, tokens and median latency since the last call of this method."""
        names = ("paid", "lost", "reused", "errors", "tokens_in", "tokens_out")
        counts = {name: float(self._counts[name]) for name in names}
        counts["latency"] = median(self._latencies) if self._latencies else 0.0
        self._counts.clear()
        self._latencies.clear()
        return counts

    async def _find_or_pay(self, call: Call) -> Outcome:
        if not self._journal.reuses:
            return await self._pay(call)
        while call.key in self._running:
            await self._running[call.key].wait()  # another game makes the same call: pay for it once
        outcome = self._journal.find(call)
        if outcome is not None:
            self._counts["reused"] += 1
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
        estimate, actual = self._estimate(call), Spending()
        await self._budget.reserve(estimate)
        begin = time.perf_counter()
        try:
            outcome = await self._source.call(call.messages, sample=call.sample)
            actual = self._cost(outcome, estimate)
        except asyncio.CancelledError as cancelled:
            # EndpointClient.send says how many attempts; other sources have one.
            lost = next((count for count in cancelled.args if isinstance(count, int)), 1)
            actual = self._record_cut_off(call, estimate, lost, time.perf_counter() - begin)
            raise
        finally:
            self._budget.settle(estimate, actual)
        latency = time.perf_counter() - begin
        self._journal.write(call, outcome, spent=actual, latency=latency)
        self._longest_reply = max(self._longest_reply, outcome.tokens_out)
        self._latencies.append(latency)
        counts = {"tokens_in": outcome.tokens_in, "tokens_out": outcome.tokens_out, "lost": outcome.lost}
        self._counts.update(paid=1, **counts)
        if outcome.verdict in ("retry", "fatal"):
            self._counts["errors"] += 1
        return outcome

    def _record_cut_off(self, call: Call, estimate: Spending, lost: int, latency: float) -> Spending:
        """Record the attempts of a call that was cut off; returns what they may have cost."""
        spent = _lost(estimate, lost)
        if lost:
            outcome = Outcome("retry", reason="the call was cancelled", lost=lost)
            self._journal.write(call, outcome, spent=spent, latency=latency)
        self._counts.update(lost=lost, errors=1)
        return spent

    def _cost(self, outcome: Outcome, estimate: Spending) -> Spending:
        """What a call cost: its reply, and the estimate for each attempt that was lost but may be billed."""
        reply = self._price.of_call(outcome.tokens_in, outcome.tokens_out)
        return reply + _lost(estimate, outcome.lost)

    def _estimate(self, call: Call) -> Spending:
        """Estimate the cost of a call from above.

        It is too low only where the request sets no limit and the reply is longer than all before it.
        """
        characters = len(str(call.parameters))
        characters += sum(len(message["content"]) + FRAME_CHARACTERS for message in call.messages)
        limit = call.parameters.get("max_tokens") or call.parameters.get("max_completion_tokens")
        reply = limit if isinstance(limit, int) else self._longest_reply or LONG_REPLY
        return self._price.of_call(characters // BILLED_CHARACTERS_PER_TOKEN, reply)


def _lost(estimate: Spending, attempts: int) -> Spending:
    """What attempts without a reply may have cost, from above."""
    return Spending(
        lost_calls=attempts, lost_tokens=attempts * estimate.tokens, lost_usd=attempts * estimate.usd
    )
