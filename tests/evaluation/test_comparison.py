"""Comparisons of two systems: their pairs, their words and their tables."""

import math
import re

import pytest

from prompt_r1.evaluation.aggregate import Results, score_predictions
from prompt_r1.evaluation.comparison import Comparison, compare_systems, comparison_tables
from prompt_r1.evaluation.predictions import System
from prompt_r1.metrics.statistics import difference_interval
from tests.evaluation.predictions import DIRECT, predict, predict_all, question_of

OURS = System("ours", "large")


def both(ours: dict[str, list[bool]], direct: dict[str, list[bool]]) -> Results:
    return score_predictions([*predict_all(ours, OURS), *predict_all(direct)])


def compared(**changes: float) -> Comparison:
    values = {"n": 50, "failed": 0, "first": 0.5, "second": 0.25, "low": -0.024, "high": 0.5}
    return Comparison(**{**values, **changes})


def test_a_difference_is_significant_if_its_interval_excludes_zero():
    assert compared().points == "+25.0 [-2.4, +50.0]" and compared().verdict == "within ±50.0"
    assert compared(low=0.001).verdict == compared(low=-0.5, high=-0.001).verdict == "significant"
    assert compared(low=-1.2, high=1.1).verdict == "within ±100.0"
    unknown = compared(low=-math.inf, high=math.inf)  # was "+25.0 [-inf, +inf] significant"
    assert (unknown.points, unknown.verdict) == ("+25.0 [too few questions]", "too few questions")


def test_pairs_are_formed_by_question_and_failed_ones_are_counted():
    first = predict_all({"towns": [True] * 9 + [False]}, OURS)
    second = predict_all({"towns": [False] * 10})
    second[3] = predict(3, "Paris", question=second[3].question, error="down")
    results = score_predictions([*first, *second])
    one = compare_systems(results, OURS, DIRECT)
    kept = [1.0] * 8 + [0.0]
    assert (one.n, one.failed, one.first, one.second) == (9, 1, pytest.approx(8 / 9), 0.0)
    assert (one.low, one.high) == pytest.approx(difference_interval(kept))
    assert compare_systems(results, DIRECT, OURS).failed == 1, "whichever system failed"


def test_datasets_have_equal_weights_in_a_comparison():
    first = {"towns": [True] * 9 + [False], "lakes": [True, False] * 4}
    one = compare_systems(both(first, {"towns": [False] * 10, "lakes": [True, False] * 4}), OURS, DIRECT)
    assert one.n == 18 and one.first == pytest.approx((0.9 + 0.5) / 2) and one.second == pytest.approx(0.25)


def test_the_tables_have_a_row_for_each_rival():
    full, cot = System("prompt-r1", "large", "a"), System("cot", "large")
    rows = [*predict_all({"towns": [True] * 9 + [False]}, full), *predict_all({"towns": [False] * 10})]
    rows += predict_all({"towns": [True] * 8 + [False] * 2}, cot)
    main, read = comparison_tables(score_predictions(rows))
    assert re.search(r"direct \(large\) \| EM \|.* \| significant", main)
    assert re.search(r"cot \(large\) \| EM \|.*\+10.0 .* \| within", main)
    assert "| EM read |" in read


def test_a_rival_without_an_answer_keeps_its_row():
    full, failed = System("prompt-r1", "large", "a"), predict(error="down")
    main, _ = comparison_tables(score_predictions([*predict_all({"towns": [True]}, full), failed]))
    assert re.search(r"direct \(large\) \| EM \| +0 .* no common question", main)


def test_free_texts_are_compared_by_f1():
    half = predict(answer="Paris Lyon", question=question_of(0, dataset="BookSum", kind="text"), system=OURS)
    results = score_predictions([half, *predict_all({"BookSum": [True]})])
    one = compare_systems(results, OURS, DIRECT)
    assert (one.first, one.second) == (pytest.approx(2 / 3), 1)
