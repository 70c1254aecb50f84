"""What calls cost, and hard limits on it. A call is let through only if the budget holds when it ends."""

import asyncio
from dataclasses import dataclass

from prompt_r1.errors import Resumable, UsageError


@dataclass(frozen=True)
class Spending:
    """Calls that were sent, their tokens, and dollars."""

    calls: int = 0
    tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(self.calls + other.calls, self.tokens + other.tokens, self.usd + other.usd)

    def __sub__(self, other: "Spending") -> "Spending":
        return Spending(self.calls - other.calls, self.tokens - other.tokens, self.usd - other.usd)

    def __str__(self) -> str:
        return f"{self.calls:,} calls, {self.tokens:,} tokens, ${self.usd:,.4f}"


@dataclass(frozen=True)
class Price:
    """Dollars per million tokens."""

    tokens_in: float = 0.0
    tokens_out: float = 0.0

    def of_call(self, tokens_in: int, tokens_out: int) -> Spending:
        """What one call of so many tokens costs."""
        usd = (tokens_in * self.tokens_in + tokens_out * self.tokens_out) / 1e6
        return Spending(1, tokens_in + tokens_out, usd)


def parse_price(text: str) -> Price:
    """A Price from "IN,OUT"; "" is free. Raises UsageError."""
    try:
        numbers = [float(part) for part in text.split(",")] if text else [0.0, 0.0]
        price = Price(*numbers)
        if len(numbers) == 2 and all(0 <= number < float("inf") for number in numbers):
            return price
    except (ValueError, TypeError):
        pass
    raise UsageError(f"--env-price takes IN,OUT in dollars per million tokens (0.15,0.60), not {text!r}")


class Budget:
    """Limits on what a run spends (0: none). `spent` begins with what the run spent before it was resumed.

    Each of `ranks` processes gets its share of what is left, so that together they keep within the limits.
    """

    def __init__(
        self,
        *,
        max_calls: int = 0,
        max_tokens: int = 0,
        max_usd: float = 0.0,
        spent: Spending | None = None,
        ranks: int = 1,
    ) -> None:
        self.before = before = spent or Spending()
        self.spent = before
        endless = float("inf")
        self._limits = {
            "calls": before.calls + (max_calls - before.calls) // ranks if max_calls else endless,
            "tokens": before.tokens + (max_tokens - before.tokens) // ranks if max_tokens else endless,
            "usd": before.usd + (max_usd - before.usd) / ranks if max_usd else endless,
        }
        self._given = {"calls": max_calls, "tokens": max_tokens, "usd": max_usd}
        self._reserved = Spending()
        self._waiting: list[asyncio.Future[None]] = []

    async def reserve(self, estimate: Spending) -> None:
        """Let a call through that will cost about `estimate`, or wait until a running one has cost less than
        was reserved for it. Raises Resumable when nothing more fits.
        """
        while limit := self._exceeded_by(self.spent + self._reserved + estimate):
            if not self._reserved.calls:
                flag = f"--max-env-{limit} {self._given[limit]:g}"
                raise Resumable(f"the budget {flag} has no room for another call; spent: {self.spent}")
            ended = asyncio.get_running_loop().create_future()
            self._waiting.append(ended)
            await ended
        self._reserved += estimate

    def settle(self, estimate: Spending, actual: Spending) -> None:
        """A call that was let through has ended."""
        self._reserved -= estimate
        self.spent += actual
        waiting, self._waiting = self._waiting, []
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)

    def _exceeded_by(self, total: Spending) -> str:
        names = ("calls", "tokens", "usd")
        return next((name for name in names if getattr(total, name) > self._limits[name] + 1e-9), "")
