"""Comparisons of two systems: their pairs, their words and their tables; and small tables in every format."""

import math

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import score_predictions
from prompt_r1.evaluation.comparison import Comparison, compare_systems, p_text, with_holm
from prompt_r1.evaluation.predictions import PredictionFile, System
from prompt_r1.metrics.statistics import difference_interval, mcnemar
from tests.evaluation.predictions import DIRECT, predict, predict_all

OURS = System("ours", "large")


def compared(p: float, p_holm: float | None, **changes: object) -> Comparison:
    values = {"dataset": "towns", "metric": "em", "n": 50, "failed": 0, "first": 0.5, "second": 0.25}
    return Comparison(
        **{**values, "low": -0.024, "high": 0.5, "test": "McNemar", "p": p, "p_holm": p_holm, **changes}
    )


@pytest.mark.parametrize(("p", "verdict"), [(0.0499, "significant"), (0.05, "within ±50.0")])
def test_a_difference_is_significant_below_a_corrected_p_of_5_percent(p, verdict):
    for one in (compared(p, None), compared(0.01, p), compared(0.9, p)):
        assert (one.verdict, one.corrected_p, one.difference) == (verdict, p, 0.25)


def test_a_difference_is_shown_in_points_and_its_bound_is_the_farther_end():
    assert compared(0.5, 0.5).points == "+25.0 [-2.4, +50.0]"
    assert compared(0.5, 0.5, low=-0.6).verdict == "within ±60.0"
    assert compared(0.5, 0.5, low=-1.2, high=1.1).verdict == "within ±100.0"
    unknown = compared(0.01, 0.01, low=-math.inf, high=math.inf)  # was "+25.0 [-inf, +inf] significant"
    assert (unknown.points, unknown.verdict) == ("+25.0 [too few questions]", "too few questions")
    assert (compared(0.5, 0.5).questions, compared(0.5, 0.5, failed=2).questions) == ("50", "50 (2 failed)")
    shown = [p_text(p) for p in (1.0, 0.0123, 0.001, 0.00099, 3.2e-5)]
    assert shown == ["1.000", "0.012", "0.001", "1e-03", "3e-05"]


def test_pairs_are_formed_by_question_and_corrected_over_the_datasets():
    first = predict_all({"towns": [True] * 9 + [False], "lakes": [True, False] * 4}, OURS)
    second = predict_all({"towns": [False] * 10, "lakes": [True, False] * 4})
    second[3] = predict(3, "Paris", question=second[3].question, setting="direct", error="down")
    lakes, towns, pooled = compare_systems(
        (score_predictions(first), OURS), (score_predictions(second), DIRECT)
    )
    kept = [1.0] * 8 + [0.0]
    assert (towns.dataset, towns.n, towns.failed, towns.metric) == ("towns", 9, 1, "em")
    assert (towns.first, towns.second, towns.p) == (8 / 9, 0.0, mcnemar(kept, [0.0] * 9))
    assert (towns.low, towns.high) == pytest.approx(difference_interval(kept))
    assert (lakes.n, lakes.first, lakes.second, lakes.p, lakes.failed) == (8, 0.5, 0.5, 1.0, 0)
    assert (towns.p_holm, lakes.p_holm) == (2 * towns.p, 1.0)
    assert (pooled.dataset, pooled.metric, pooled.p_holm) == ("pooled", "main", None)
    assert (pooled.n, pooled.failed) == (17, 1)
    turned = compare_systems((score_predictions(second), DIRECT), (score_predictions(first), OURS))
    assert [one.failed for one in turned] == [0, 1, 1], "whichever system failed"
    assert pooled.first == pytest.approx((8 / 9 + 0.5) / 2) and pooled.second == pytest.approx(0.25)
    sides = (score_predictions(first[:10]), OURS), (score_predictions(second[:10]), DIRECT)
    [only] = compare_systems(*sides, metric="f1")
    assert (only.dataset, only.metric) == ("towns", "f1") and with_holm([]) == []


def test_long_texts_are_not_compared_by_exact_match():
    ours, direct = predict_all({"BookSum": [True, False]}, OURS), predict_all({"BookSum": [True, True]})
    sides = (score_predictions(ours), OURS), (score_predictions(direct), DIRECT)
    assert compare_systems(*sides, metric="em") == compare_systems(*sides, metric="sm") == []
    assert [one.metric for one in compare_systems(*sides)] == ["f1"]


def test_a_folder_with_files_of_others_is_refused(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(UsageError, match="there are files in it that are not of an evaluation"):
        PredictionFile(tmp_path / "predictions.jsonl")
