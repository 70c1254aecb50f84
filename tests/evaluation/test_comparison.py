"""Comparisons of two systems: their pairs, their words and their tables."""

import math
import re

import pytest

from prompt_r1.evaluation.aggregate import Results, score_predictions
from prompt_r1.evaluation.comparison import Comparison, compare_systems, comparison_tables, p_text
from prompt_r1.evaluation.predictions import System
from prompt_r1.metrics.statistics import difference_interval, mcnemar
from tests.evaluation.predictions import DIRECT, predict, predict_all, question_of
from tests.metrics.test_statistics import exact_sign_flip

OURS = System("ours", "large")


def both(ours: dict[str, list[bool]], direct: dict[str, list[bool]]) -> Results:
    return score_predictions([*predict_all(ours, OURS), *predict_all(direct)])


def compared(**changes: float) -> Comparison:
    values = {"n": 50, "failed": 0, "first": 0.5, "second": 0.25, "low": -0.024, "high": 0.5, "p": 0.01}
    return Comparison(test="McNemar", **{**values, **changes})


def test_a_difference_is_significant_below_a_corrected_p_of_5_percent():
    assert compared().verdict(0.0499) == "significant"
    assert compared().verdict(0.05) == "within ±50.0"


def test_a_difference_is_shown_in_points_and_its_bound_is_the_farther_end():
    assert compared().points == "+25.0 [-2.4, +50.0]"
    assert compared(low=-0.6).verdict(0.5) == "within ±60.0"
    assert compared(low=-1.2, high=1.1).verdict(0.5) == "within ±100.0"
    unknown = compared(low=-math.inf, high=math.inf)  # was "+25.0 [-inf, +inf] significant"
    assert (unknown.points, unknown.verdict(0.01)) == ("+25.0 [too few questions]", "too few questions")
    shown = [p_text(p) for p in (1.0, 0.0123, 0.001, 0.00099, 3.2e-5)]
    assert shown == ["1.000", "0.012", "0.001", "1e-03", "3e-05"]


def test_pairs_are_formed_by_question_and_failed_ones_are_counted():
    first = predict_all({"towns": [True] * 9 + [False]}, OURS)
    second = predict_all({"towns": [False] * 10})
    second[3] = predict(3, "Paris", question=second[3].question, error="down")
    results = score_predictions([*first, *second])
    one = compare_systems(results, OURS, DIRECT)
    kept = [1.0] * 8 + [0.0]
    assert (one.n, one.failed, one.first, one.second) == (9, 1, pytest.approx(8 / 9), 0.0)
    assert one.p == mcnemar(kept, [0.0] * 9)
    assert (one.low, one.high) == pytest.approx(difference_interval(kept))
    assert compare_systems(results, DIRECT, OURS).failed == 1, "whichever system failed"


def test_datasets_have_equal_weights_in_a_comparison():
    first = {"towns": [True] * 9 + [False], "lakes": [True, False] * 4}
    one = compare_systems(both(first, {"towns": [False] * 10, "lakes": [True, False] * 4}), OURS, DIRECT)
    assert one.n == 18 and one.first == pytest.approx((0.9 + 0.5) / 2) and one.second == pytest.approx(0.25)


def test_p_values_are_corrected_over_the_methods():
    full, cot = System("prompt-r1", "large", "a"), System("cot", "large")
    rows = [*predict_all({"towns": [True] * 9 + [False]}, full), *predict_all({"towns": [False] * 10})]
    rows += predict_all({"towns": [True] * 4 + [False] * 6}, cot)
    main, read = comparison_tables(score_predictions(rows))
    assert re.search(r"direct \(large\) \| EM \|.*McNemar \| 0.004 \| 0.008 \| significant", main)
    assert re.search(r"cot \(large\) \| EM \|.*McNemar \| 0.062 \| 0.062 \| within", main)
    assert "| EM read |" in read


def test_repeated_answers_are_compared_by_sign_flips_instead_of_mcnemar():
    """Means over repeats, such as 1/2, are not wins or losses."""
    rows = []
    for number in range(12):
        for sample in range(2):
            rows.append(predict(number, sample=sample, system=OURS))
            rows.append(predict(number, "Paris" if sample else "Lyon", sample=sample))
    one = compare_systems(score_predictions(rows), OURS, DIRECT)
    assert (one.test, one.n, one.first - one.second) == ("sign flip", 12, 0.5) and one.p < 0.005


def test_free_texts_are_compared_by_f1():
    half = predict(answer="Paris Lyon", question=question_of(0, dataset="BookSum", kind="text"), system=OURS)
    results = score_predictions([half, *predict_all({"BookSum": [True]})])
    one = compare_systems(results, OURS, DIRECT)
    assert (one.first, one.second) == (pytest.approx(2 / 3), 1)


def test_the_pooled_p_is_about_the_pooled_difference():
    """A raw McNemar test counted 30 wins against 8 losses (p = 0.0005) although the second system was better
    by 28 points in the mean of the datasets."""
    first = {"towns": [True] * 30 + [False] * 62, "rivers": [False] * 9}
    second = {"towns": [False] * 92, "rivers": [True] * 8 + [False]}
    pooled = compare_systems(both(first, second), OURS, DIRECT)
    assert pooled.first - pooled.second == pytest.approx((30 / 92 - 8 / 9) / 2) and pooled.test == "sign flip"
    smaller = {"towns": [True] * 6 + [False] * 14, "rivers": [False] * 4}
    other = {"towns": [False] * 20, "rivers": [True] * 3 + [False]}
    pooled = compare_systems(both(smaller, other), OURS, DIRECT)
    assert pooled.p == pytest.approx(exact_sign_flip([1 / 20] * 6 + [-1 / 4] * 3), abs=0.015)
    assert pooled.p > 0.2  # McNemar's for six wins and three losses is 0.51, in the other direction


def test_the_pooled_test_of_datasets_of_equal_size_is_mcnemars():
    first = {"towns": [True] * 9 + [False] * 11, "rivers": [True] * 8 + [False] * 12}
    second = {"towns": [False] * 20, "rivers": [False] * 20}
    pooled = compare_systems(both(first, second), OURS, DIRECT)
    assert (pooled.test, pooled.p) == ("McNemar", pytest.approx(2 / 2**17))


def test_a_question_of_one_system_only_is_no_pair():
    results = score_predictions([predict(1, system=OURS), predict(question=question_of(1, dataset="lakes"))])
    assert compare_systems(results, OURS, DIRECT) is None
