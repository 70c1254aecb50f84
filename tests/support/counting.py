"""Environments with a journal and a budget, and a source that counts its calls."""

import asyncio
from pathlib import Path

from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import Call, Outcome, Source
from prompt_r1.types import Ask, Message

HELLO: list[Message] = [{"role": "user", "content": "Where?"}]
PRICE = Price(1.0, 10.0)  # dollars per million tokens


class CountingSource:
    """Replies with the number of the call, after a millisecond; 10 tokens in, 5 out."""

    def __init__(
        self, *outcomes: Outcome, name: str = "counting", samples: bool = True, **parameters: object
    ) -> None:
        self.name, self.samples, self.by_session = name, samples, False
        self.parameters = parameters
        self.outcomes = list(outcomes)
        self.calls = self.running = self.peak = 0

    async def reply(self, call: Call) -> Outcome:
        await call.begin()
        self.calls += 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        number = self.calls
        await asyncio.sleep(0.001)
        self.running -= 1
        ok = Outcome("ok", text=f"reply {number}", finish="stop", tokens_in=10, tokens_out=5)
        return self.outcomes.pop(0) if self.outcomes else ok

    async def check(self, ask: Ask) -> None:
        raise AssertionError("check was called")


def environment(
    *sources: Source,
    folder: Path | None = None,
    price: Price = PRICE,
    budget: Budget | None = None,
    **options: object,
) -> Environment:
    """An environment with the journal of a folder. `options` are those of Environment."""
    return Environment(sources, journal=Journal(folder), budget=budget, price=price, **options)


async def text_of(asked: Environment, *, sample: int = 0) -> str:
    """The reply's text of one call."""
    return await asked.ask(HELLO, Caller("q1", sample))


def ask(asked: Environment, *, sample: int = 0) -> str:
    """The reply's text of one call, in an event loop of its own."""
    return asyncio.run(text_of(asked, sample=sample))
