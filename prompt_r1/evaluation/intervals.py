"""95 % confidence intervals over questions.

They are Wilson's, which are made for zeros and ones. Other scores from 0 to 1, such as F1, have at most the
variance of zeros and ones with the same mean, so for them the interval is only too wide.
"""

from collections.abc import Collection, Sequence
from math import sqrt
from statistics import NormalDist, fmean

Z = NormalDist().inv_cdf(0.975)  # A standard normal variable is within ±Z with a probability of 95 %.


def wilson(rate: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a rate over `n` questions (Wilson 1927).

    It is valid for small n and for rates near 0 and 1.
    """
    assert n > 0 and 0 <= rate <= 1, f"a rate of {rate} over {n} questions"
    centre = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n))
    # At a rate of 0 or 1, one end is exactly 0 or 1. Floating-point numbers would miss it.
    low = 0.0 if rate == 0 else centre - half
    high = 1.0 if rate == 1 else centre + half
    return low, high


def mean_interval(groups: Collection[Sequence[float]]) -> tuple[float, float]:
    """The interval of the mean of the groups' means. A group has a score for each of its questions.

    Every group counts as if it had no more questions than the smallest one. For groups of one size, and for a
    single group, this is Wilson's interval over all their questions.
    """
    mean = fmean(fmean(scores) for scores in groups)
    smallest = min(len(scores) for scores in groups)
    # Rounding may exceed the range from 0 to 1, and SSim, a cosine, may be a little below 0.
    rate = min(max(mean, 0.0), 1.0)
    return wilson(rate, smallest * len(groups))


def bounds_text(low: float, high: float, form: str) -> str:
    """An interval in brackets, each end in the format `form`: [0.92, 0.97]."""
    return f"[{low:{form}}, {high:{form}}]"
