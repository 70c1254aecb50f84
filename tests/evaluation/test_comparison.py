"""Comparisons of two systems: their pairs, their words and their tables."""

import math

import pytest

from prompt_r1.evaluation.aggregate import Results, score_predictions
from prompt_r1.evaluation.comparison import Comparison, compare_systems, p_text, with_holm
from prompt_r1.evaluation.predictions import System
from prompt_r1.metrics.statistics import difference_interval, mcnemar
from tests.evaluation.predictions import DIRECT, predict, predict_all, question_of
from tests.metrics.test_statistics import exact_sign_flip

OURS = System("ours", "large")


def both(ours: dict[str, list[bool]], direct: dict[str, list[bool]]) -> Results:
    return score_predictions([*predict_all(ours, OURS), *predict_all(direct)])


def compared(p: float, p_holm: float | None, **changes: object) -> Comparison:
    values = {"dataset": "towns", "metric": "em", "n": 50, "failed": 0, "first": 0.5, "second": 0.25}
    return Comparison(
        **{**values, "low": -0.024, "high": 0.5, "test": "McNemar", "p": p, "p_holm": p_holm, **changes}
    )


@pytest.mark.parametrize(("p", "verdict"), [(0.0499, "significant"), (0.05, "within ±50.0")])
def test_a_difference_is_significant_below_a_corrected_p_of_5_percent(p, verdict):
    for one in (compared(p, None), compared(0.01, p), compared(0.9, p)):
        assert one.verdict == verdict


def test_a_difference_is_shown_in_points_and_its_bound_is_the_farther_end():
    assert compared(0.5, 0.5).points == "+25.0 [-2.4, +50.0]"
    assert compared(0.5, 0.5, low=-0.6).verdict == "within ±60.0"
    assert compared(0.5, 0.5, low=-1.2, high=1.1).verdict == "within ±100.0"
    unknown = compared(0.01, 0.01, low=-math.inf, high=math.inf)  # was "+25.0 [-inf, +inf] significant"
    assert (unknown.points, unknown.verdict) == ("+25.0 [too few questions]", "too few questions")
    shown = [p_text(p) for p in (1.0, 0.0123, 0.001, 0.00099, 3.2e-5)]
    assert shown == ["1.000", "0.012", "0.001", "1e-03", "3e-05"]


def test_pairs_are_formed_by_question_and_corrected_over_the_datasets():
    first = predict_all({"towns": [True] * 9 + [False], "lakes": [True, False] * 4}, OURS)
    second = predict_all({"towns": [False] * 10, "lakes": [True, False] * 4})
    second[3] = predict(3, "Paris", question=second[3].question, error="down")
    results = score_predictions([*first, *second])
    lakes, towns, pooled = compare_systems(results, OURS, DIRECT)
    kept = [1.0] * 8 + [0.0]
    assert (towns.dataset, towns.n, towns.failed, towns.metric) == ("towns", 9, 1, "em")
    assert (towns.first, towns.second, towns.p) == (8 / 9, 0.0, mcnemar(kept, [0.0] * 9))
    assert (towns.low, towns.high) == pytest.approx(difference_interval(kept))
    assert (lakes.n, lakes.first, lakes.second, lakes.p, lakes.failed) == (8, 0.5, 0.5, 1.0, 0)
    assert (towns.p_holm, lakes.p_holm) == (2 * towns.p, 1.0)
    assert (pooled.dataset, pooled.metric, pooled.p_holm) == ("pooled", "main", None)
    assert (pooled.n, pooled.failed) == (17, 1)
    turned = compare_systems(results, DIRECT, OURS)
    assert [one.failed for one in turned] == [0, 1, 1], "whichever system failed"
    assert pooled.first == pytest.approx((8 / 9 + 0.5) / 2) and pooled.second == pytest.approx(0.25)
    assert {one.metric for one in compare_systems(results, OURS, DIRECT, metric="f1")} == {"f1"}
    assert with_holm([]) == []


def test_repeated_answers_are_compared_by_sign_flips_instead_of_mcnemar():
    """Means over repeats, such as 1/2, are not wins or losses."""
    rows = []
    for number in range(12):
        for sample in range(2):
            rows.append(predict(number, sample=sample, system=OURS))
            rows.append(predict(number, "Paris" if sample else "Lyon", sample=sample))
    [one] = compare_systems(score_predictions(rows), OURS, DIRECT)
    assert (one.test, one.n, one.first - one.second) == ("sign flip", 12, 0.5) and one.p < 0.005


def test_free_texts_are_compared_by_f1():
    results = both({"BookSum": [True, False]}, {"BookSum": [True, True]})
    assert [one.metric for one in compare_systems(results, OURS, DIRECT)] == ["f1"]


def test_the_pooled_p_is_about_the_pooled_difference():
    """A raw McNemar test counted 30 wins against 8 losses (p = 0.0005) although the second system was better
    by 28 points in the mean of the datasets."""
    first = {"towns": [True] * 30 + [False] * 62, "rivers": [False] * 9}
    second = {"towns": [False] * 92, "rivers": [True] * 8 + [False]}
    pooled = compare_systems(both(first, second), OURS, DIRECT)[-1]
    assert pooled.first - pooled.second == pytest.approx((30 / 92 - 8 / 9) / 2) and pooled.test == "sign flip"
    smaller = {"towns": [True] * 6 + [False] * 14, "rivers": [False] * 4}
    other = {"towns": [False] * 20, "rivers": [True] * 3 + [False]}
    pooled = compare_systems(both(smaller, other), OURS, DIRECT)[-1]
    assert pooled.p == pytest.approx(exact_sign_flip([1 / 20] * 6 + [-1 / 4] * 3), abs=0.015)
    assert pooled.p > 0.2  # McNemar's for six wins and three losses is 0.51, in the other direction


def test_the_pooled_test_of_datasets_of_equal_size_is_mcnemars():
    first = {"towns": [True] * 9 + [False] * 11, "rivers": [True] * 8 + [False] * 12}
    second = {"towns": [False] * 20, "rivers": [False] * 20}
    pooled = compare_systems(both(first, second), OURS, DIRECT)[-1]
    assert (pooled.test, pooled.p) == ("McNemar", pytest.approx(2 / 2**17))


def test_a_question_of_one_system_only_is_no_pair():
    results = score_predictions([predict(1, system=OURS), predict(question=question_of(1, dataset="lakes"))])
    assert compare_systems(results, OURS, DIRECT) == []
