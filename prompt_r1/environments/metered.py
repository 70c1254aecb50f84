"""One environment with its journal, its budget and its counts: what is between a game and a provider."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from prompt_r1.endpoint.responses import Outcome, reply_of
from prompt_r1.environments.budget import Budget, Price, Spending
from prompt_r1.environments.journal import Journal, key_of
from prompt_r1.errors import UsageError
from prompt_r1.types import Environment, Message

LONG_REPLY = 1024  # tokens reserved for a reply while none has been seen and no limit was set
CHARACTERS_PER_TOKEN = 3  # of a prompt: reserving too much is safe


@dataclass(frozen=True)
class Reply:
    """What an environment said and what saying it costs, whether it was paid now or the journal had it."""

    text: str
    tokens_in: int
    tokens_out: int
    usd: float


class Source(Protocol):
    """Where replies come from. `parameters`: all that shapes a reply besides model, messages and sample."""

    name: str
    parameters: Mapping[str, object]

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome: ...

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError if it is plain beforehand that no call can succeed."""

    async def close(self) -> None: ...


class FreeSource:
    """The mini world's environments as a source: they know no tokens, no price and no failures."""

    def __init__(self, environment: Environment, *, seed: int) -> None:
        self.name = environment.name
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._environment = environment

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        return Outcome("ok", text=await self._environment.ask(messages), finish="stop")

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        await self._environment.close()


class MeteredEnvironment:
    """Looks into the journal, then at the budget, then asks the source, and writes down what came of it."""

    def __init__(self, source: Source, *, journal: Journal, budget: Budget, price: Price) -> None:
        self.name = source.name
        self.counts: Counter[str] = Counter()
        self.latencies: list[float] = []  # seconds, of the calls since `take_counts`
        self._source = source
        self._journal = journal
        self._budget = budget
        self._price = price
        self._running: dict[str, asyncio.Event] = {}
        self._longest_reply = 0

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        """The text of `call`."""
        return (await self.call(messages, sample=sample, session=session)).text

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Reply:
        """The reply. Raises EnvError, FatalEnvError, and Resumable when the budget is used up."""
        outcome = await self._outcome(messages, sample, session)
        cost = self._price.of_call(outcome.tokens_in, outcome.tokens_out)
        return Reply(reply_of(outcome, self.name), outcome.tokens_in, outcome.tokens_out, cost.usd)

    async def _outcome(self, messages: list[Message], sample: int, session: str) -> Outcome:
        key = key_of(self.name, messages, self._source.parameters, sample)
        if not self._journal.reuses:
            return await self._pay(key, messages, sample, session)
        while key in self._running:
            await self._running[key].wait()  # the same call of another game: one payment is enough
        outcome = self._journal.find(key)
        if outcome is not None:
            self.counts["reused"] += 1
            return outcome
        if self._journal.mode == "replay":
            call = f"call {len(messages) // 2 + 1} of game {sample} about question {session!r}"
            raise UsageError(f"--journal replay: {self.name} has no recorded reply to {call}; "
                             "record it with --journal reuse")  # fmt: skip
        self._running[key] = asyncio.Event()
        try:
            return await self._pay(key, messages, sample, session)
        finally:
            self._running.pop(key).set()

    async def check(self) -> None:
        if self._journal.mode != "replay":
            await self._source.check()

    async def close(self) -> None:
        await self._source.close()

    def take_counts(self) -> dict[str, float]:
        """Calls paid, reused and failed, tokens, and latency since the last take."""
        names = ("paid", "reused", "errors", "tokens_in", "tokens_out")
        counts = {name: float(self.counts[name]) for name in names}
        counts["latency"] = median(self.latencies) if self.latencies else 0.0
        self.counts, self.latencies = Counter(), []
        return counts

    async def _pay(self, key: str, messages: list[Message], sample: int, session: str) -> Outcome:
        estimate, actual = self._estimate(messages), Spending()
        await self._budget.reserve(estimate)
        begin = time.perf_counter()
        try:
            outcome = await self._source.call(messages, sample=sample)
            actual = self._price.of_call(outcome.tokens_in, outcome.tokens_out)
        finally:
            self._budget.settle(estimate, actual)
        latency = time.perf_counter() - begin
        self._journal.write(key, outcome, actual, model=self.name, prompt=messages[-1]["content"],
                            sample=sample, session=session, latency=latency)  # fmt: skip
        self._longest_reply = max(self._longest_reply, outcome.tokens_out)
        self.latencies.append(latency)
        self.counts.update(paid=1, tokens_in=outcome.tokens_in, tokens_out=outcome.tokens_out)
        self.counts["errors"] += outcome.verdict in ("retry", "fatal")
        return outcome

    def _estimate(self, messages: list[Message]) -> Spending:
        """What a call may cost. Without a limit on replies, one longer than all before costs more."""
        parameters = self._source.parameters
        letters = sum(len(message["content"]) + 20 for message in messages) + len(str(parameters))
        limit = parameters.get("max_tokens") or parameters.get("max_completion_tokens")
        reply = limit if isinstance(limit, int) else self._longest_reply or LONG_REPLY
        return self._price.of_call(letters // CHARACTERS_PER_TOKEN, reply)
