"""Environments with a journal and a budget, and a source that counts its calls."""

import asyncio
from pathlib import Path

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.metered import MeteredEnvironment
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.sources import ReplySource
from prompt_r1.types import Message

HELLO: list[Message] = [{"role": "user", "content": "Where?"}]
PRICE = Price(1.0, 10.0)  # dollars per million tokens


class CountingSource:
    """Replies with the number of the call, after a millisecond; 10 tokens in, 5 out."""

    name = "counting"

    def __init__(self, *outcomes: Outcome, parameters: dict[str, object] | None = None) -> None:
        self.parameters = parameters or {}
        self.outcomes = list(outcomes)
        self.calls = self.running = self.peak = 0

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        self.calls += 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        number = self.calls
        await asyncio.sleep(0.001)
        self.running -= 1
        ok = Outcome("ok", text=f"reply {number}", finish="stop", tokens_in=10, tokens_out=5)
        return self.outcomes.pop(0) if self.outcomes else ok

    async def check(self) -> None:
        raise AssertionError("check was called")


def metered(
    source: CountingSource, folder: Path | None = None, *, mode: str = "reuse", budget: Budget | None = None
) -> MeteredEnvironment:
    journal = Journal(folder, mode=mode)
    return MeteredEnvironment(source, journal=journal, budget=budget or Budget(), price=PRICE)


async def text_of(environment: MeteredEnvironment, *, sample: int = 0) -> str:
    """The reply's text of one call."""
    return (await environment.call(HELLO, sample=sample, session="q1")).text


def ask(environment: MeteredEnvironment, *, sample: int = 0) -> str:
    """The reply's text of one call, in an event loop of its own."""
    return asyncio.run(text_of(environment, sample=sample))


def pool(*sources: ReplySource, folder: Path | None = None, mode: str = "reuse", **options: object) -> Pool:
    """A pool without limits. `options` are those of Pool."""
    journal, budget = Journal(folder, mode=mode), Budget()
    members = [MeteredEnvironment(source, journal=journal, budget=budget, price=PRICE) for source in sources]
    return Pool(members, budget=budget, journal=journal, **options)
