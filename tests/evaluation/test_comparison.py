"""Comparisons of two systems: their pairs, their words and their tables; and small tables in every format."""

import math
from dataclasses import replace

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import Rate, score_predictions
from prompt_r1.evaluation.comparison import (
    Comparison,
    compare_systems,
    comparison_table,
    p_text,
    printed_comparisons,
    printed_pair,
    with_holm,
)
from prompt_r1.evaluation.predictions import Prediction, PredictionFile, System
from prompt_r1.evaluation.results_folder import printed_results
from prompt_r1.evaluation.tables import Entry, Table, to_markdown
from prompt_r1.metrics.statistics import difference_interval, mcnemar
from prompt_r1.spending import Spending
from tests.evaluation.predictions import DIRECT, predict, predict_all, question_of

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


def test_the_tables_of_comparisons_have_these_columns():
    pair = [compared(0.01, 0.02), compared(0.5, None, dataset="pooled", metric="main", failed=1)]
    assert comparison_table(pair).splitlines() == [
        "| dataset | metric | n | first | second | difference [95 %] | test | p | p (Holm) | verdict |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| towns | EM | 50 | 50.0 | 25.0 | +25.0 [-2.4, +50.0] | McNemar | 0.010 | 0.020 | significant |",
        "| pooled | main | 50 (1 failed) | 50.0 | 25.0 | +25.0 [-2.4, +50.0] | McNemar | 0.500 |  "
        "| within ±50.0 |",
    ]
    assert [line.split() for line in printed_pair(pair[:1], "EM").splitlines()] == [
        ["EM", "n", "A", "B", "A", "-", "B", "[95", "%]", "p", "verdict"],
        ["towns", "50", "50.0", "25.0", "+25.0", "[-2.4,", "+50.0]", "0.020", "significant"],
    ]
    [_, row] = printed_comparisons(OURS, pair[:1]).splitlines()
    assert row.split() == ["towns", "50", "+25.0", "[-2.4,", "+50.0]", "0.020", "significant"]


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
    assert pooled.first == pytest.approx((8 / 9 + 0.5) / 2) and pooled.second == pytest.approx(0.25)
    sides = (score_predictions(first[:10]), OURS), (score_predictions(second[:10]), DIRECT)
    [only] = compare_systems(*sides, metric="f1")
    assert (only.dataset, only.metric) == ("towns", "f1") and with_holm([]) == []


def test_long_texts_are_not_compared_by_exact_match():
    ours, direct = predict_all({"BookSum": [True, False]}, OURS), predict_all({"BookSum": [True, True]})
    sides = (score_predictions(ours), OURS), (score_predictions(direct), DIRECT)
    assert compare_systems(*sides, metric="em") == compare_systems(*sides, metric="sm") == []
    assert [one.metric for one in compare_systems(*sides)] == ["f1"]


def test_results_are_printed_without_the_columns_that_nobody_filled():
    ours = [
        replace(one, spent=Spending(5, 1000, 234, 0.0123))
        for one in predict_all({"towns": [True, True]}, OURS)
    ]
    ours.append(predict(9, system=OURS, error="HTTP 500"))
    results = score_predictions([*predict_all({"towns": [True, False]}), *ours])
    lines = printed_results(results).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells[0][:3] == ["method", "n", "errors"] and cells[0][-1] == "$"
    assert not {"format", "SSim"} & set(cells[0])
    assert cells[1][-3:] == ["0.00", "0", "0"]
    assert cells[2][2] == "1" and cells[2][-3:] == ["5.00", "1,234", "0.012"]
    for row, rate in ((cells[1], "0.500 ["), (cells[2], "1.000 [")):
        assert any(cell.startswith(rate) for cell in row)


RATE = Rate(0.75, 0.5, 0.875, 8, 0)


def test_a_small_table_in_every_format():
    """A best rate, one over fewer questions with errors, plain numbers, an empty cell, the paper's row."""
    rows, columns = [("ours", "A"), ("x&y", "B")], [("towns", "EM"), ("calls", "")]
    entries = {
        (rows[0], columns[0]): Entry(RATE, best=True, paper=71.5, usual_n=8),
        (rows[0], columns[1]): Entry(number=1234.5),
        (rows[1], columns[0]): Entry(Rate(0.25, 0.0, 0.5, 6, 2), usual_n=8),
    }
    table = Table("Table 9: a title", ("method", "agent"), entries)
    assert to_markdown(table).splitlines() == [
        "### Table 9: a title",
        "",
        "| method | agent | towns EM | calls |",
        "|---|---|---:|---:|",
        "| ours | A | **75.0** [50.0, 87.5] | 1,234 |",
        "|  | A, paper | 71.50 |  |",
        "| x&y | B | 25.0 [0.0, 50.0] (n 6, 2 errors) | – |",
    ]


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0.00"), (0.0099, "0.0099"), (0.01, "0.01"), (99.994, "99.99"), (100, "100"), (12345.6, "12,346")],
)
def test_a_plain_number_has_as_many_digits_as_it_needs(number, shown):
    table = Table("T", ("",), {(("r",), ("c",)): Entry(number=number)})
    assert to_markdown(table).splitlines()[-1] == f"| r | {shown} |"


def test_a_prediction_without_a_game_is_one_turn_without_calls_or_costs(tmp_path):
    one = Prediction(question_of(), None)
    assert (one.raw, one.sample, one.stop, one.error, one.turns) == ("", 0, "answered", "", 1)
    assert one.spent == Spending() and (one.format, one.reward, one.setting) == (None, None, "")
    file = PredictionFile(tmp_path / "predictions.jsonl")
    file.add(one)
    assert file.find("", question_of(), 0) == one and file.find("", question_of(), 1) is None
    assert file.predictions_for("", [(question_of(), 0), (question_of(2), 0)]) == [one]
    file.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x").touch()
    with pytest.raises(UsageError, match="there are files in it that are not of an evaluation"):
        PredictionFile(tmp_path / "other/predictions.jsonl")
