"""The cost of calls, and hard limits on it. A call starts only if the budget still holds when it ends.

Lost attempts that the provider may have billed are the exception: nothing is reserved for them, and they
count in all limits when their call ends.
"""

import asyncio
from dataclasses import dataclass
from itertools import repeat
from operator import add, mul, sub

from prompt_r1.errors import Resumable, UsageError

# Estimates of tokens that are billed. Low, because a budget may end early, but not late.
BILLED_CHARACTERS_PER_TOKEN = 3
ROUNDING = 1e-9  # tolerance of sums of dollars


@dataclass(frozen=True)
class Spending:
    """Calls that ended, with the tokens and dollars of their replies.

    Apart from them, the attempts without a reply that the provider may have billed too, from above.
    """

    calls: int = 0
    tokens: int = 0
    usd: float = 0.0
    lost_calls: int = 0
    lost_tokens: int = 0
    lost_usd: float = 0.0

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(*map(add, self.amounts, other.amounts))

    def __sub__(self, other: "Spending") -> "Spending":
        return Spending(*map(sub, self.amounts, other.amounts))

    def times(self, count: int) -> "Spending":
        """The same spending several times."""
        return Spending(*map(mul, self.amounts, repeat(count)))

    @property
    def amounts(self) -> list[float]:
        """All fields, in their order. `dataclasses.astuple` would copy each deeply, ten times slower."""
        return list(vars(self).values())

    def __str__(self) -> str:
        text = f"{self.calls:,} calls, {self.tokens:,} tokens, ${self.usd:,.4f}"
        if self.lost_calls:
            text += f" (and for lost attempts at most {self.lost_calls:,}, {self.lost_tokens:,}"
            text += f" and ${self.lost_usd:,.4f})"
        return text

    def at_most(self, name: str) -> float:
        """The upper bound of `calls`, `tokens` or `usd`: with the lost attempts."""
        return getattr(self, name) + getattr(self, f"lost_{name}")


@dataclass(frozen=True)
class Price:
    """Dollars per million tokens."""

    tokens_in: float = 0.0
    tokens_out: float = 0.0

    def of_call(self, tokens_in: int, tokens_out: int) -> Spending:
        """The spending of one call."""
        usd = (tokens_in * self.tokens_in + tokens_out * self.tokens_out) / 1e6
        return Spending(1, tokens_in + tokens_out, usd)


def parse_price(text: str) -> Price:
    """Parse "IN,OUT", in dollars per million tokens; "" is free. Raises UsageError."""
    if not text:
        return Price()
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 2 or not all(0 <= number < float("inf") for number in numbers):
        raise UsageError(f"--env-price takes IN,OUT in dollars per million tokens (0.15,0.60), not {text!r}")
    return Price(*numbers)


def parse_prices(texts: tuple[str, ...]) -> tuple[Price, ...]:
    """One price for all environments, or one for each. Without any, calls are free."""
    return tuple(parse_price(text) for text in texts) or (Price(),)


class OutOfBudget(Resumable):
    """The budget of the run has no room for another call."""


class Budget:
    """Limits on the calls, tokens and dollars of a run (0: no limit).

    `spent` is what the run spent before it was resumed. Each of `ranks` processes gets an equal share of what
    is left, so that all of them together keep the limits.
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
        # By the field of Spending; fields without a limit are absent.
        self._limits: dict[str, float] = {}
        self._share: dict[str, float] = {}  # the part of each limit that this rank may reach
        if max_calls:
            self._limits["calls"] = max_calls
            self._share["calls"] = before.at_most("calls") + (max_calls - before.at_most("calls")) // ranks
        if max_tokens:
            self._limits["tokens"] = max_tokens
            self._share["tokens"] = (
                before.at_most("tokens") + (max_tokens - before.at_most("tokens")) // ranks
            )
        if max_usd:
            self._limits["usd"] = max_usd
            self._share["usd"] = before.at_most("usd") + (max_usd - before.at_most("usd")) / ranks
        self._reserved = Spending()
        self._waiting: list[asyncio.Future[None]] = []

    async def reserve(self, estimate: Spending) -> None:
        """Reserve the estimated cost of a call, and wait while only the reservations of others prevent it.

        Raises Resumable when the call does not fit although no other call is running.
        """
        while limit := self._exceeded_limit(self.spent + self._reserved + estimate):
            if not self._reserved.calls:
                flag = f"--max-env-{limit} {self._limits[limit]:g}"
                raise OutOfBudget(f"the budget {flag} has no room for another call; spent: {self.spent}")
            ended = asyncio.get_running_loop().create_future()
            self._waiting.append(ended)
            await ended
        self._reserved += estimate

    def settle(self, estimate: Spending, actual: Spending) -> None:
        """Replace the reservation of a call that has ended by its actual cost."""
        self._reserved -= estimate
        self.spent += actual
        waiting, self._waiting = self._waiting, []
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)

    def _exceeded_limit(self, total: Spending) -> str:
        """The name of the first limit that a total exceeds; "" if it exceeds none."""
        for name, share in self._share.items():
            if total.at_most(name) > share + ROUNDING:
                return name
        return ""
