"""Sums of what calls, games and runs cost; limits are in `environments.budget`."""

from dataclasses import dataclass
from operator import add, mul, sub


@dataclass(frozen=True)
class Spending:
    """Calls with their tokens and dollars.

    An attempt that brought no reply, but may have been billed, is charged as a call at its estimate.
    """

    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0
    lost_usd: float = 0.0  # the part of `usd` that attempts without a reply may have cost

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(*map(add, self.amounts, other.amounts))

    def __sub__(self, other: "Spending") -> "Spending":
        return Spending(*map(sub, self.amounts, other.amounts))

    def __mul__(self, count: int) -> "Spending":
        return Spending(*map(mul, self.amounts, [count] * len(self.amounts)))

    def __str__(self) -> str:
        lost = f" (${self.lost_usd:,.4f} of it estimated, for lost attempts)" if self.lost_usd else ""
        return f"{self.calls:,} calls, {self.tokens:,} tokens, ${self.usd:,.4f}{lost}"

    @property
    def amounts(self) -> list[float]:
        """All fields, in their order. `dataclasses.astuple` would copy each deeply, ten times slower."""
        return list(vars(self).values())

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out
