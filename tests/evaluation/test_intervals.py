"""Intervals against their definitions and in simulations."""

import math

import numpy as np
import pytest

from prompt_r1.evaluation.intervals import mean_interval, wilson

SIMULATIONS = 1_000


def f1_like(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Scores distributed like F1: 40 % are 0, 30 % are 1, the others in between. The true mean is 0.45."""
    which, between = rng.random(shape), rng.beta(2, 2, shape)
    return np.where(which < 0.4, 0.0, np.where(which < 0.7, 1.0, between))


@pytest.mark.parametrize(("successes", "n"), [(0, 128), (1, 5), (60, 128), (125, 128), (128, 128)])
def test_wilson_contains_the_rates_that_a_score_test_does_not_reject(successes, n):
    def distance(rate: float) -> float:
        return abs(successes / n - rate) - 1.959963984540054 * math.sqrt(rate * (1 - rate) / n)

    low, high = wilson(successes / n, n)
    assert low == 0 if successes == 0 else distance(low) == pytest.approx(0, abs=1e-12)
    assert high == 1 if successes == n else distance(high) == pytest.approx(0, abs=1e-12)
    assert distance((low + high) / 2) < 0


def test_scores_of_zero_and_one_get_the_interval_of_a_rate():
    assert mean_interval([[0.0] * 128]) == wilson(0, 128)
    assert mean_interval([[0, 1, 1, 0, 1]]) == wilson(3 / 5, 5)


def test_datasets_of_one_size_get_the_interval_of_all_their_questions():
    groups = [[1.0] * 30 + [0.0] * 34, [0.0] * 64]
    assert mean_interval(groups) == wilson(30 / 128, 128)


def test_a_large_dataset_does_not_make_the_average_with_a_small_one_certain():
    small = [1.0, 0.0, 1.0, 0.0]
    assert mean_interval([small, [0.0] * 10_000]) == mean_interval([small, [0.0] * 4])


def test_a_mean_of_cosines_below_zero_has_an_interval():
    """Embeddings of unrelated texts may point in opposite directions."""
    assert mean_interval([[-0.02, -0.01]]) == wilson(0, 2)


@pytest.mark.slow
def test_the_intervals_of_scores_and_of_macro_averages_cover_the_true_values():
    """An interval may be wider than it needs to be, but never narrower."""
    rng = np.random.default_rng(2)
    covered = macro_covered = 0
    for _ in range(SIMULATIONS):
        scores, others = f1_like(rng, (2, 128))
        low, high = mean_interval([scores])
        covered += low <= 0.45 <= high
        low, high = mean_interval([scores[:40], 1 - others])
        macro_covered += low <= 0.5 <= high
    assert covered / SIMULATIONS >= 0.95
    assert macro_covered / SIMULATIONS >= 0.95
