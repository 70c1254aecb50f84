"""What calls of the environment cost.

A call may need several requests. Two sums count them:

    charged   what the requests may have cost: for limits, and for the user who pays
    spent     the calls, and what their replies cost: for rewards, metrics and tables. The sum of a game is
              the same if a resumed run plays it again, with replies from the journal. (The journal records
              the replies of a run: environments/journal.py.)

    what happens                            is added to charged       is added to spent

    a reply comes                           its price                 its price
    a reply is in the journal               nothing                   its price
    a reply is lost, and may be billed      one call, as estimated    nothing
    the server is busy, and bills nothing   nothing                   nothing
    the server refuses the request          one call without tokens   nothing
    a call fails, after its last request    nothing                   one call without tokens

A refused request ends its call, so it counts as a call. A busy server gets the request again, so the request
that it did not accept does not count.

A failed call is one call in `spent`, however many requests it took: a resumed run may take more or fewer.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Spending:
    """Calls with their tokens and dollars."""

    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0
    lost_usd: float = 0.0  # The part of `usd` that requests without a reply may have cost.

    @property
    def amounts(self) -> list[float]:
        """All fields, in their order. `dataclasses.astuple` would copy each of them deeply."""
        return [self.calls, self.tokens_in, self.tokens_out, self.usd, self.lost_usd]

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(
            calls=self.calls + other.calls,
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
            usd=self.usd + other.usd,
            lost_usd=self.lost_usd + other.lost_usd,
        )

    def __mul__(self, count: int) -> "Spending":
        return Spending(
            calls=self.calls * count,
            tokens_in=self.tokens_in * count,
            tokens_out=self.tokens_out * count,
            usd=self.usd * count,
            lost_usd=self.lost_usd * count,
        )

    def __sub__(self, other: "Spending") -> "Spending":
        return self + other * -1

    def __str__(self) -> str:
        parts = ["1 call" if self.calls == 1 else f"{self.calls:,} calls"]
        if self.tokens:
            parts.append(f"{self.tokens_in:,} + {self.tokens_out:,} tokens")
        if self.usd:
            parts.append(dollars(self.usd))
        text = ", ".join(parts)
        if self.lost_usd:
            text += f" ({dollars(self.lost_usd)} of it estimated, for lost requests)"
        return text

    @property
    def tokens(self) -> int:
        """Tokens in both directions."""
        return self.tokens_in + self.tokens_out


def dollars(usd: float) -> str:
    """Write an amount with four decimals, or six below a cent: a call of a small model costs $0.000031."""
    return f"${usd:,.4f}" if usd >= 0.01 else f"${usd:.6f}"
