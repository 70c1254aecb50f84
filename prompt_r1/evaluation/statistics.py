"""95 % confidence intervals of rates and means.

The questions are the sample. Rates get Wilson's interval, other means a bootstrap over questions, whose
random numbers are always the same. scipy's bootstrap has no intervals widened for small samples.
"""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Z = NormalDist().inv_cdf(0.975)  # a standard normal variable is within ±Z with a probability of 95 %
RESAMPLES = 10_000
FEWEST = 6  # values that a bootstrap needs
CHUNK = 2_000_000  # random numbers drawn at a time; limits the memory without changing the result


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a rate; valid for small n and for rates near 0 and 1 (Wilson 1927)."""
    assert n > 0 and 0 <= successes <= n, f"{successes} successes among {n}"
    rate = successes / n
    centre = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n))
    # The ends are exactly 0 and 1 for 0 and n successes, but floating point misses them.
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half


def mean_interval(values: ArrayLike, *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The interval of the mean of `values`, one per question.

    Wilson's interval if all values are 0 or 1, because resampling only zeros would give an interval of width
    0; otherwise a bootstrap.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if np.isin(numbers, (0.0, 1.0)).all():
        return wilson(float(numbers.sum()), len(numbers))
    return bootstrap(numbers, len(numbers), resamples)


def macro_interval(
    groups: Mapping[str, ArrayLike], interval: Callable[[Floats], tuple[float, float]] = mean_interval
) -> tuple[float, float]:
    """The interval of the mean of the datasets' means, from the `interval` of each (Zou and Donner 2008).

    `groups` maps each dataset to one value per question. Datasets are not resampled: the interval is about
    other questions from the same datasets.
    """
    numbers = [np.asarray(values, dtype=np.float64) for values in groups.values()]
    means = np.array([values.mean() for values in numbers])
    low, high = np.transpose([interval(values) for values in numbers])
    # Distances of independent estimates add up like standard deviations.
    below, above = (float(np.linalg.norm(end - means)) / len(means) for end in (low, high))
    return float(means.mean()) - below, float(means.mean()) + above


def bounds_text(low: float, high: float, form: str) -> str:
    """An interval in brackets, each end in the format `form`: [0.92, 0.97]."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "[too few questions]"
    return f"[{low:{form}}, {high:{form}}]"


def bootstrap(values: Floats, n: int, resamples: int) -> tuple[float, float]:
    """The percentile interval of the mean, widened as Student's t for n questions (Hesterberg 2015).

    (-inf, inf) for fewer than six questions.
    """
    if n < FEWEST:
        return -math.inf, math.inf
    rng, size = np.random.default_rng(0), len(values)
    rows = max(1, CHUNK // size)
    counts = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    index_type = np.uint16 if size <= 2**16 else np.uint32  # small integers are drawn several times faster
    drawn = (values[rng.integers(0, size, size=(count, size), dtype=index_type)] for count in counts)
    means = np.concatenate([sample.mean(axis=1) for sample in drawn])
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_quantile(n - 1))
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)


def student_quantile(freedom: int) -> float:
    """The t within ±t of which a Student variable lies with a probability of 95 %.

    By an expansion (Abramowitz and Stegun 26.7.5) that errs by 0.003 for 5 degrees of freedom or more.
    """
    first = (Z**3 + Z) / (4 * freedom)
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * freedom**3)
    return Z + first + second + third
