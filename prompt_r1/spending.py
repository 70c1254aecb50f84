"""Sums of what calls, games and runs cost; limits are in `environments.budget`."""

from dataclasses import dataclass
from operator import add, mul, sub


@dataclass(frozen=True)
class Spending:
    """Calls that ended, with the tokens and dollars of their replies.

    Apart from them, the attempts without a reply that the provider may have billed too, from above.
    """

    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0
    lost_calls: int = 0
    lost_tokens: int = 0
    lost_usd: float = 0.0

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(*map(add, self.amounts, other.amounts))

    def __sub__(self, other: "Spending") -> "Spending":
        return Spending(*map(sub, self.amounts, other.amounts))

    def __mul__(self, count: int) -> "Spending":
        return Spending(*map(mul, self.amounts, [count] * len(self.amounts)))

    def __str__(self) -> str:
        text = f"{self.calls:,} calls, {self.tokens:,} tokens, ${self.usd:,.4f}"
        if self.lost_calls:
            text += f" (and for lost attempts at most {self.lost_calls:,}, {self.lost_tokens:,}"
            text += f" and ${self.lost_usd:,.4f})"
        return text

    @property
    def amounts(self) -> list[float]:
        """All fields, in their order. `dataclasses.astuple` would copy each deeply, ten times slower."""
        return list(vars(self).values())

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out

    def at_most(self, name: str) -> float:
        """The upper bound of `calls` or `usd`: with the lost attempts."""
        return getattr(self, name) + getattr(self, f"lost_{name}")
