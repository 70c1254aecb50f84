"""95 % confidence intervals and paired tests.

The questions are the sample. Rates get Wilson's interval, other means a bootstrap over questions, and two
methods are compared on the same questions. The random numbers are always the same. scipy's bootstrap has
neither intervals widened for small samples nor a correction for few differences.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Z = NormalDist().inv_cdf(0.975)  # a standard normal variable is within ±Z with a probability of 95 %
STUDENT = (12.706, 4.303, 3.182, 2.776)  # `student_quantile` of 1 to 4 degrees of freedom, from a table
RESAMPLES = 10_000
FEW_DIFFERENCES = 10
CHUNK = 2_000_000  # random numbers drawn at a time; limits the memory without changing the result


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a rate; valid for small n and for rates near 0 and 1 (Wilson 1927)."""
    assert n > 0 and 0 <= successes <= n, f"{successes} successes among {n}"
    rate = successes / n
    centre = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n))
    # The ends are exactly 0 and 1 for 0 and n successes, but floating point misses them.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def cluster_means(values: ArrayLike, clusters: Sequence[Hashable]) -> Floats:
    """The mean of each cluster, in the order in which the clusters first appear.

    Repeated answers to a question are not independent: average them first, so that each question is one
    observation.
    """
    numbers = _floats(values)
    assert len(clusters) == len(numbers), f"{len(clusters)} clusters for {len(numbers)} values"
    number_of = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    index = np.array([number_of[cluster] for cluster in clusters], dtype=np.int64)
    means: Floats = np.bincount(index, weights=numbers) / np.bincount(index)
    return means


def mean_interval(
    values: ArrayLike, clusters: Sequence[Hashable] | None = None, *, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The interval of the mean of `values`, one per question; with `clusters`, of the mean of their means.

    Percentile bootstrap, or Wilson's interval if all values are 0 or 1: resampling only zeros would give an
    interval of width 0. A single other value gives (-inf, inf).
    """
    numbers = _floats(values) if clusters is None else cluster_means(values, clusters)
    if np.isin(numbers, (0.0, 1.0)).all():
        return wilson(float(numbers.sum()), len(numbers))
    means = _resampled_means(numbers, resamples, np.random.default_rng(0))
    return _percentiles(means, len(numbers))


def macro_interval(
    groups: Mapping[str, ArrayLike], interval: Callable[[Floats], tuple[float, float]] = mean_interval
) -> tuple[float, float]:
    """The interval of the mean of the datasets' means, from the `interval` of each (Zou and Donner 2008).

    `groups` maps each dataset to one value per question: scores, or with `difference_interval` paired
    differences. Datasets are not resampled: the interval is about other questions from the same datasets.
    """
    assert groups, "no datasets"
    numbers = [_floats(values) for values in groups.values()]
    means = np.array([values.mean() for values in numbers])
    low, high = np.transpose([interval(values) for values in numbers])
    # Distances of independent estimates add up like standard deviations.
    below, above = (float(np.linalg.norm(end - means)) / len(means) for end in (low, high))
    return float(means.mean()) - below, float(means.mean()) + above


def difference_interval(differences: ArrayLike, *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The percentile interval of the mean of paired differences: of two scores of each question.

    If fewer than ten questions differ, resampling underestimates the spread. One win for each side is then
    added to the sample, as Bonett and Price (2012) do for rates.
    """
    observed = _floats(differences)
    few = np.count_nonzero(observed) < FEW_DIFFERENCES
    drawn_from = np.append(observed, (1.0, -1.0)) if few else observed
    means = _resampled_means(drawn_from, resamples, np.random.default_rng(0))
    return _percentiles(means, len(observed))


def seeds_interval(means: Sequence[float], questions: tuple[float, float]) -> tuple[float, float]:
    """The interval of the mean over seeds, each of which has its own training and its own questions.

    Student's interval of the seeds' `means`, but not narrower than `questions`, the interval over the
    questions of these seeds, which alone remains for a single one.
    """
    if len(means) == 1:
        return questions
    half = student_quantile(len(means) - 1) * stdev(means) / math.sqrt(len(means))
    return min(questions[0], fmean(means) - half), max(questions[1], fmean(means) + half)


def bounds_text(low: float, high: float, form: str) -> str:
    """An interval in brackets, each end in the format `form`: [0.92, 0.97]."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "[too few questions]"
    return f"[{low:{form}}, {high:{form}}]"


def mcnemar(a: ArrayLike, b: ArrayLike) -> float:
    """Exact two-sided p value of McNemar's test for scores of 0 and 1.

    The null hypothesis is that a and b win equally many of the questions on which they differ. Repeated
    answers to a question are not independent: use `sign_flip` on `cluster_means` for them.
    """
    differences = _differences(a, b)
    assert np.isin(_floats(a), (0, 1)).all() and np.isin(_floats(b), (0, 1)).all(), "scores are not 0 or 1"
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip(a: ArrayLike, b: ArrayLike, *, resamples: int = RESAMPLES) -> float:
    """Two-sided p value of the paired permutation test, which flips the signs of a - b at random.

    The observed signs count as one of the permutations, so p is never 0 and few resamples do not raise the
    rate of false positives.
    """
    differences = _differences(a, b)
    differences = differences[differences != 0]
    # Tolerance: sums that are equal in exact arithmetic may differ by a rounding error.
    observed = abs(differences.sum()) - 1e-9
    rng = np.random.default_rng(0)

    def flipped_sums(rows: int) -> Floats:
        signs = 2.0 * rng.integers(0, 2, size=(rows, len(differences)), dtype=np.int8) - 1.0
        sums: Floats = signs @ differences
        return sums

    sums = _in_chunks(flipped_sums, resamples, len(differences))
    return float((1 + (np.abs(sums) >= observed).sum()) / (1 + resamples))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for multiple comparisons (Holm 1979); significant if below alpha."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _floats(values: ArrayLike) -> Floats:
    numbers = np.asarray(values, dtype=np.float64)
    assert numbers.ndim == 1 and len(numbers), f"expected one value per question, not shape {numbers.shape}"
    assert np.isfinite(numbers).all(), "a value is not finite"
    return numbers


def _differences(a: ArrayLike, b: ArrayLike) -> Floats:
    first, second = _floats(a), _floats(b)
    assert len(first) == len(second), f"{len(first)} scores against {len(second)}: not the same questions"
    return first - second


def _resampled_means(values: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Means of samples of the same size, drawn with replacement. (resamples,)"""
    n = len(values)
    index_type = np.uint16 if n <= 2**16 else np.uint32  # small integers are drawn several times faster

    def means(rows: int) -> Floats:
        drawn: Floats = values[rng.integers(0, n, size=(rows, n), dtype=index_type)]
        return drawn.mean(axis=1)

    return _in_chunks(means, resamples, n)


def _in_chunks(draw: Callable[[int], Floats], rows: int, columns: int) -> Floats:
    step = max(1, CHUNK // max(1, columns))
    return np.concatenate([draw(min(step, rows - start)) for start in range(0, rows, step)])


def _percentiles(means: Floats, n: int) -> tuple[float, float]:
    """The percentile interval, widened as Student's t is for small n (Hesterberg 2015, "expanded")."""
    if n == 1:
        return -math.inf, math.inf
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_quantile(n - 1))
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)


def student_quantile(freedom: int) -> float:
    """The t within ±t of which a Student variable lies with a probability of 95 %.

    By the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5), which errs by 0.003 for 5 degrees of
    freedom and by less for more.
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    first = (Z**3 + Z) / (4 * freedom)
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * freedom**3)
    return Z + first + second + third


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that k of n answers, so many of them `right`, hold a right one (Chen et al. 2021, eq. 1)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)
