"""Intervals and tests against their definitions, against enumerations and in simulations."""

import itertools
import math
import random
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest

from prompt_r1.metrics.statistics import (
    _resampled_means,
    cluster_means,
    difference_interval,
    holm,
    macro_interval,
    mcnemar,
    mean_interval,
    seeds_interval,
    sign_flip,
    student_quantile,
    wilson,
)

SIMULATIONS = 2_000


def f1_like(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Scores distributed like F1: 40 % are 0, 30 % are 1, the others in between. The true mean is 0.45."""
    which, between = rng.random(shape), rng.beta(2, 2, shape)
    return np.where(which < 0.4, 0.0, np.where(which < 0.7, 1.0, between))


# --- Intervals ------------------------------------------------------------------------------------


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
    assert mean_interval([0, 0, 1, 1], clusters=["q", "q", "r", "r"]) == wilson(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 3])
def test_the_interval_of_a_mean_covers_the_true_mean(repeats: int) -> None:
    """Repeated answers are correlated: the interval of 3 x 128 values covers only if they are clustered."""
    rng = np.random.default_rng(1)
    questions = [question for question in range(128) for _ in range(repeats)]
    covered, naive = 0, 0
    for values in f1_like(rng, (SIMULATIONS, 128)):
        repeated = np.repeat(values, repeats)
        low, high = mean_interval(repeated, questions if repeats > 1 else None, resamples=1_000)
        covered += low <= 0.45 <= high
        if repeats > 1:
            low, high = mean_interval(repeated, resamples=200)
            naive += low <= 0.45 <= high
    assert 0.93 <= covered / SIMULATIONS <= 0.97
    assert naive / SIMULATIONS < 0.85


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


def test_the_interval_over_seeds_is_students_unless_questions_leave_more_open() -> None:
    low, high = seeds_interval([0.5, 0.6, 0.61], (0.54, 0.6))  # scipy.stats.t.interval(0.95, 2, mean, sem)
    assert (low, high) == pytest.approx((0.570 - 0.1511, 0.570 + 0.1511), abs=1e-4)
    assert seeds_interval([0.0, 0.0, 0.0], wilson(0, 300)) == wilson(0, 300)
    assert seeds_interval([0.5], (0.4, 0.6)) == (0.4, 0.6)


def test_a_single_score_has_an_infinite_interval() -> None:
    assert mean_interval([0.4]) == macro_interval({"a": [0.4], "b": [0.1, 0.9]}) == (-math.inf, math.inf)


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


def test_cluster_means_are_in_the_order_of_first_appearance() -> None:
    assert cluster_means([1, 0, 0.5, 1], ["q2", "q1", "q2", "q1"]).tolist() == [0.75, 0.5]


def test_a_paired_comparison_needs_equally_many_scores() -> None:
    with pytest.raises(AssertionError, match="3 scores against 2"):
        sign_flip([1, 0, 1], [1, 0])


# --- Tests ----------------------------------------------------------------------------------------


def exact_sign_flip(differences: list[float]) -> float:
    """The share of all sign assignments whose sum is at least as large."""
    assignments = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in assignments]
    return sum(value >= abs(sum(differences)) - 1e-9 for value in sums) / len(sums)


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (3, 0), (0, 6), (4, 4), (9, 3), (2, 7)])
def test_mcnemar_equals_the_enumeration_of_all_outcomes(wins: int, losses: int) -> None:
    a = [1] * wins + [0] * losses + [1, 0, 1]
    b = [0] * wins + [1] * losses + [1, 0, 1]
    assert mcnemar(a, b) == mcnemar(b, a) == exact_sign_flip([1.0] * wins + [-1.0] * losses)


def test_mcnemar_works_for_thousands_of_questions() -> None:
    assert mcnemar([1] * 1_536, [0] * 1_536) == 0
    assert mcnemar([1] * 768 + [0] * 768, [0] * 768 + [1] * 768) == 1
    with pytest.raises(AssertionError, match="not 0 or 1"):
        mcnemar([0.5], [0.0])


def test_sign_flip_equals_the_enumeration_of_all_signs() -> None:
    rng = random.Random(0)
    for _ in range(5):
        differences = [round(rng.gauss(0.3, 0.6), 1) for _ in range(11)]
        p = sign_flip(differences, [0.0] * 11)
        assert p == pytest.approx(exact_sign_flip(differences), abs=0.02)
    assert sign_flip([0.5, 1], [0.5, 1]) == 1


def test_the_p_value_of_a_permutation_test_is_never_zero() -> None:
    """Forty wins of forty: none of the 99 random assignments is as extreme, but the observed one counts."""
    assert sign_flip([1.0] * 40, [0.0] * 40, resamples=99) == 1 / 100


def test_equal_methods_differ_significantly_in_at_most_five_percent_of_cases() -> None:
    """Two methods that each answer 45 % of 128 questions, and agree on about half of them."""
    rng = np.random.default_rng(5)
    a, b = rng.random((2, SIMULATIONS, 128)) < 0.45
    a_f1, b_f1 = f1_like(rng, (2, SIMULATIONS, 128))
    assert np.mean([mcnemar(x, y) <= 0.05 for x, y in zip(a, b, strict=True)]) <= 0.06
    flips = [sign_flip(x, y, resamples=500) <= 0.05 for x, y in zip(a_f1, b_f1, strict=True)]
    assert 0.03 <= np.mean(flips) <= 0.06


def test_holm_rejects_the_same_hypotheses_as_the_step_down_procedure() -> None:
    def rejected(p_values: list[float], alpha: float) -> set[int]:
        """Holm's step-down procedure, from the smallest p value."""
        found = set()
        for index in sorted(range(len(p_values)), key=p_values.__getitem__):
            if p_values[index] * (len(p_values) - len(found)) > alpha:
                break
            found.add(index)
        return found

    rng = random.Random(1)
    for _ in range(50):
        p_values = [rng.choice([rng.random(), rng.random() / 50, 0.01]) for _ in range(12)]
        adjusted = holm(p_values)
        for alpha in (0.01, 0.05, 0.2):
            assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected(p_values, alpha)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


@pytest.mark.parametrize(
    ("freedom", "quantile", "error"),
    [
        (1, 12.706, 1e-9),
        (2, 4.303, 1e-9),
        (4, 2.776, 1e-9),
        (5, 2.570582, 3e-3),
        (10, 2.228139, 2e-4),
        (30, 2.042272, 1e-5),
        (10**6, 1.959966, 1e-6),
    ],
)
def test_students_quantiles_are_those_of_the_tables(freedom, quantile, error):
    assert student_quantile(freedom) == pytest.approx(quantile, abs=error)


def test_a_hundred_thousand_questions_are_all_drawn() -> None:
    """Above 65,536 an index needs more than 16 bits."""
    values = np.zeros(70_000)
    values[66_000:] = 1.0
    means = _resampled_means(values, 20, np.random.default_rng(0))
    assert means.mean() == pytest.approx(4_000 / 70_000, rel=0.05)
    exact = np.arange(2**16, dtype=np.float64)
    assert _resampled_means(exact, 20, np.random.default_rng(0)).mean() == pytest.approx(2**15, rel=0.01)


def test_the_difference_of_a_single_question_has_no_bounds():
    """Two questions that are added to few differences are no observations."""
    assert difference_interval([1.0]) == difference_interval([0.0]) == (-math.inf, math.inf)
