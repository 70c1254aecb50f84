"""Environments with a journal and a budget, and a source that counts its calls."""

import asyncio
from pathlib import Path

from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import Caller, Reply, Source, limit_in
from prompt_r1.types import Message

PRICE = Price(1.0, 10.0)  # dollars per million tokens


class CountingSource(Source):
    """Replies with the number of the attempt, after a millisecond; 10 tokens in, 5 out.

    Of `script`, each attempt takes one: a reply, or an exception that it raises.
    """

    def __init__(
        self, *script: Reply | Exception, name: str = "counting", samples: bool = True, **parameters: object
    ) -> None:
        self.name, self.samples = name, samples
        self.parameters = parameters
        self.reply_limit = limit_in(parameters)
        self.script = list(script)
        self.calls = self.running = self.peak = 0

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        self.calls += 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        number = self.calls
        try:
            await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        step = self.script.pop(0) if self.script else Reply(f"reply {number}", tokens_in=10, tokens_out=5)
        if isinstance(step, Exception):
            raise step
        return step


def environment(
    *sources: Source,
    folder: Path | None = None,
    price: Price = PRICE,
    budget: Budget | None = None,
    **options: object,
) -> Environment:
    """An environment with the journal of a folder. `options` are those of Environment."""
    journal = Journal(folder)
    return Environment(sources, journal=journal, budget=budget, prices=[price] * len(sources), **options)
