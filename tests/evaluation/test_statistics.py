"""Intervals against their definitions and in simulations."""

import math
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest

from prompt_r1.evaluation.statistics import macro_interval, mean_interval, wilson
from studies.seeds import difference_interval

SIMULATIONS = 1_000


def f1_like(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Scores distributed like F1: 40 % are 0, 30 % are 1, the others in between. The true mean is 0.45."""
    which, between = rng.random(shape), rng.beta(2, 2, shape)
    return np.where(which < 0.4, 0.0, np.where(which < 0.7, 1.0, between))


@pytest.mark.parametrize(("successes", "n"), [(0, 128), (1, 5), (60, 128), (125, 128), (128, 128)])
def test_wilson_contains_the_rates_that_a_score_test_does_not_reject(successes: int, n: int) -> None:
    def distance(rate: float) -> float:
        return abs(successes / n - rate) - 1.959963984540054 * math.sqrt(rate * (1 - rate) / n)

    low, high = wilson(successes, n)
    assert low == 0 if successes == 0 else distance(low) == pytest.approx(0, abs=1e-12)
    assert high == 1 if successes == n else distance(high) == pytest.approx(0, abs=1e-12)
    assert distance((low + high) / 2) < 0


def test_a_mean_of_zeros_and_ones_gets_the_interval_of_a_rate() -> None:
    assert mean_interval([0.0] * 128) == wilson(0, 128)
    assert mean_interval([0, 1, 1, 0, 1]) == wilson(3, 5)


@pytest.mark.slow
def test_the_intervals_of_a_difference_and_of_a_macro_average_cover_the_true_values() -> None:
    rng = np.random.default_rng(2)
    difference_covered, macro_covered = 0, 0
    for _ in range(SIMULATIONS):
        a, noise, c, d = f1_like(rng, (4, 128))
        both = np.where(rng.random(128) < 0.5, a, noise)  # correlated with a, same mean
        low, high = difference_interval(a - both, resamples=1_000)
        difference_covered += low <= 0 <= high
        low, high = macro_interval(
            {"one": a[:40], "two": 1 - c, "three": d[:60]}, partial(mean_interval, resamples=1_000)
        )
        macro_covered += low <= (0.45 + 0.55 + 0.45) / 3 <= high
    assert 0.93 <= difference_covered / SIMULATIONS <= 0.97
    assert 0.93 <= macro_covered / SIMULATIONS <= 0.97


def test_the_bootstrap_equals_the_normal_interval_for_many_questions() -> None:
    a, b = f1_like(np.random.default_rng(3), (2, 1_000))
    half = 1.96 * (a - b).std(ddof=1) / math.sqrt(1_000)
    low, high = difference_interval(a - b)
    assert low == pytest.approx((a - b).mean() - half, abs=0.05 * half)
    assert high == pytest.approx((a - b).mean() + half, abs=0.05 * half)
    low, high = macro_interval({"a": a, "b": b})
    half = 1.96 * math.sqrt(a.var(ddof=1) + b.var(ddof=1)) / 2 / math.sqrt(1_000)
    assert (low + high) / 2 == pytest.approx((a.mean() + b.mean()) / 2, abs=0.05 * half)
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)


@pytest.mark.parametrize(("n", "quantile"), [(8, 2.364624), (20, 2.093024)])  # t of n - 1 degrees of freedom
def test_the_bootstrap_of_few_scores_is_as_wide_as_students_interval(n: int, quantile: float) -> None:
    """A plain percentile bootstrap of eight scores is a fifth too narrow."""
    normal = NormalDist(0.5, 0.1)
    scores = np.array([normal.inv_cdf((place + 0.5) / n) for place in range(n)])
    half = quantile * scores.std(ddof=1) / math.sqrt(n)
    low, high = mean_interval(scores, resamples=50_000)
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)
    lowest, highest = difference_interval([*scores[:-1], 0.0], resamples=50_000)
    assert highest - lowest > high - low  # the last difference is 0, far from the others


def test_a_macro_interval_of_scores_without_spread_has_a_width() -> None:
    """Resampling alone gives [0, 0] for a method that is never right, and proves nothing."""
    low, high = macro_interval({"a": [0.0] * 64, "b": [0.0] * 64})
    assert low == 0 and high == pytest.approx(wilson(0, 64)[1] / math.sqrt(2))
    low, high = macro_interval({"a": [0.0] * 64, "b": [0.0] * 64}, difference_interval)
    assert low < 0 < high


def test_fewer_than_six_questions_have_an_infinite_interval() -> None:
    """Two questions that are added to few differences are no observations."""
    unknown = (-math.inf, math.inf)
    assert mean_interval([0.4]) == macro_interval({"a": [0.4], "b": [0.1, 0.9]}) == unknown
    assert difference_interval([1.0] * 5) == unknown and mean_interval([0.5] * 6) == (0.5, 0.5)


def test_few_differences_get_one_win_and_one_loss_more() -> None:
    """Nine wins, no loss, 128 questions: resampling these alone would never draw a loss."""
    low, high = difference_interval([1.0] * 9 + [0.0] * 119)
    middle, squares = 9 / 130, 11 / 130  # mean and mean square with the two added questions
    half = 1.979 * math.sqrt((squares - middle**2) / 130)  # Student's t of 127 degrees of freedom
    assert low == pytest.approx(middle - half, abs=0.1 * half)
    assert high == pytest.approx(middle + half, abs=0.1 * half)
    enough = [1.0] * 10 + [0.0] * 118  # ten differences are resampled unchanged
    # 2.5 % and 97.5 % of the binomial distribution of 128 draws with 10 in 128
    assert difference_interval(enough) == (5 / 128, 17 / 128)


@pytest.mark.slow
def test_the_interval_of_a_difference_covers_the_true_value_if_few_questions_differ() -> None:
    """A plain bootstrap covers 83 %: two or three of 128 questions differ, often in the same direction."""
    outcome = np.random.default_rng(8).random((SIMULATIONS, 128))
    covered = 0
    for differences in np.where(outcome < 0.014, 1, np.where(outcome < 0.02, -1, 0)):
        low, high = difference_interval(differences, resamples=1_000)
        covered += low <= 0.008 <= high
    assert covered / SIMULATIONS >= 0.93


def test_a_hundred_thousand_questions_are_all_drawn() -> None:
    """Above 65,536 an index needs more than 16 bits."""
    values = np.zeros(70_000)
    values[66_000:] = 0.5
    low, high = mean_interval(values, resamples=200)
    assert low < 2_000 / 70_000 < high < 2_200 / 70_000
