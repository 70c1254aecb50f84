"""The price of calls, and hard limits on calls and dollars, of a run (Budget) and of a game (Bill).

A request starts only if its estimated cost fits into what is left.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prompt_r1.errors import LimitReached, Resumable, UsageError
from prompt_r1.spending import Spending

ROUNDING = 1e-9  # tolerance of sums of dollars


@dataclass(frozen=True)
class Price:
    """Dollars per million tokens."""

    tokens_in: float = 0.0
    tokens_out: float = 0.0

    def of_call(self, tokens_in: int, tokens_out: int) -> Spending:
        """What one call with these tokens costs."""
        usd = (tokens_in * self.tokens_in + tokens_out * self.tokens_out) / 1e6
        return Spending(1, tokens_in, tokens_out, usd)


FREE = Price()


def parse_price(text: str) -> Price:
    """Parse "IN,OUT", in dollars per million tokens; "" is free."""
    if not text:
        return FREE
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 2 or not all(0 <= number < float("inf") for number in numbers):
        raise UsageError(f"--env-price takes IN,OUT in dollars per million tokens (0.15,0.60), not {text!r}")
    return Price(*numbers)


def parse_prices(texts: Sequence[str], names: Sequence[str]) -> dict[str, Price]:
    """The price of each environment: `texts` has one price for all, or one for each, in the order of `names`.

    Without prices all are free. Raises UsageError for another number of prices, and as `parse_price` does.
    """
    names = list(dict.fromkeys(names))
    prices = [parse_price(text) for text in texts] or [FREE]
    if len(prices) == 1:
        prices *= len(names)
    if len(prices) != len(names):
        raise UsageError(
            f"--env-price takes one price, or one for each of {', '.join(names)} in this order, not "
            f"{len(prices)}"
        )
    return dict(zip(names, prices, strict=True))


def check_usd_limit(flag: str, sources: Iterable[tuple[Price, int | None]]) -> None:
    """Raise UsageError if a limit of dollars cannot be kept. `flag` names it as the user gave it.

    `sources` has the price of each source, and the most tokens of its replies (None: nothing limits them).
    """
    reply_limits = [reply_limit for price, reply_limit in sources if price != FREE]
    if not reply_limits:
        raise UsageError(
            f"{flag} needs --env-price IN,OUT above 0 (env_price of `load`): without a price, dollars are "
            "not counted"
        )
    if None in reply_limits:
        raise UsageError(
            f"{flag} needs a limit of each reply, such as --env-args '{{\"max_tokens\": 1024}}' (env_args of "
            "`load`): without it, nobody knows what the next call will cost"
        )


class OutOfBudget(Resumable):
    """The budget of the run has no room for another call."""


class Budget:
    """Limits on the calls and dollars of a run (0: no limit).

    `charged` is what the run was charged before it was resumed. Each of `ranks` processes gets an equal share
    of what is left, so that all processes together keep the limits. The first that uses up its share ends the
    run.
    """

    def __init__(
        self, *, max_calls: int = 0, max_usd: float = 0.0, charged: Spending | None = None, ranks: int = 1
    ) -> None:
        self.charged = charged or Spending()
        self.charged_before = self.charged  # what earlier processes were charged
        self.max_calls = max_calls
        self.max_usd = max_usd
        self._ranks = ranks
        # The most that `charged` may become on this rank.
        self._most_calls = _limit_of_rank(max_calls, self.charged.calls, ranks)
        self._most_usd = _limit_of_rank(max_usd, self.charged.usd, ranks)
        self._reserved = Spending()
        self._settled = asyncio.Event()  # The next request that ends sets it, and wakes those that wait.

    async def reserve(self, estimate: Spending) -> None:
        """Reserve the estimated cost of a request.

        If the request does not fit, it waits until other requests have ended, because they may cost less than
        was reserved for them. Raises OutOfBudget if it does not fit although no other request is running.
        """
        while exceeded_limit := self._exceeded_limit(self.charged + self._reserved + estimate):
            if not self._reserved.calls:
                rank_note = ""
                if self._ranks > 1:
                    rank_note = f" of this rank, which has 1/{self._ranks} of what was left at the start"
                raise OutOfBudget(
                    f"the budget {exceeded_limit} has no room for another call{rank_note}; spent: "
                    f"{self.charged}; a larger limit resumes the run"
                )
            await self._settled.wait()
        self._reserved += estimate

    def settle(self, estimate: Spending, actual: Spending) -> None:
        """Replace the reservation of a request that has ended by its actual cost."""
        self._reserved -= estimate
        self.charged += actual
        self._settled.set()
        self._settled = asyncio.Event()  # The requests that wait from now on wait for this.

    def _exceeded_limit(self, total: Spending) -> str:
        """The flag of the limit that `total` exceeds, with its value; "" if it exceeds none."""
        if total.calls > self._most_calls + ROUNDING:
            return f"--max-env-calls {self.max_calls}"
        if total.usd > self._most_usd + ROUNDING:
            return f"--max-env-usd {self.max_usd:g}"
        return ""


def _limit_of_rank(limit: float, charged_before: float, ranks: int) -> float:
    """The limit of `charged` on one rank.

    On every rank, `charged` begins with all that the run was charged before. So the limit is this amount and
    the rank's share of what is left.
    """
    if not limit:
        return math.inf
    return charged_before + (limit - charged_before) / ranks


@dataclass
class Bill:
    """What the calls of a game cost, in the two sums of spending.py, and a limit."""

    max_usd: float = math.inf  # No request starts that may take the dollars in `charged` above this limit.
    charged: Spending = field(default_factory=Spending)
    spent: Spending = field(default_factory=Spending)

    def check(self, estimate: Spending) -> None:
        """Raise LimitReached if a request with this estimated cost may exceed the limit."""
        if self.charged.usd + estimate.usd > self.max_usd:
            raise LimitReached(
                f"the next request may exceed the limit of ${self.max_usd:g}; spent: ${self.charged.usd:.6f}"
            )
