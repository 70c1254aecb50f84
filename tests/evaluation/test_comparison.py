"""Comparisons of two systems: their pairs, their words and their tables."""

import re
from statistics import fmean

import pytest

from prompt_r1.evaluation.aggregate import Results, score_predictions
from prompt_r1.evaluation.comparison import compare_systems, comparison_tables
from prompt_r1.evaluation.predictions import System
from prompt_r1.metrics.statistics import difference_interval
from tests.evaluation.predictions import DIRECT, predict, predict_all, question_of

OURS = System("ours", "large")


def both(ours: dict[str, list[bool]], direct: dict[str, list[bool]]) -> Results:
    return score_predictions([*predict_all(ours, OURS), *predict_all(direct)])


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([True] * 9 + [False], [False] * 10, "significant"),
        ([False] * 10, [True] * 9 + [False], "significant"),
        ([True, False] * 5, [False, True] * 5, "within ±80.0"),
        ([True] * 5, [False] * 5, "too few questions"),  # was "[-inf, +inf] significant"
    ],
)
def test_a_difference_is_significant_if_its_interval_excludes_zero(first, second, verdict):
    differences = [float(one) - float(other) for one, other in zip(first, second, strict=True)]
    low, high = (100 * end for end in difference_interval(differences))
    interval = f"[{low:+.1f}, {high:+.1f}]" if len(first) > 5 else "[too few questions]"
    cells = compare_systems(both({"towns": first}, {"towns": second}), OURS, DIRECT)
    assert cells[3:] == (f"{100 * fmean(differences):+.1f} {interval}", verdict)


def test_pairs_are_formed_by_question_and_failed_ones_are_counted():
    first = predict_all({"towns": [True] * 9 + [False]}, OURS)
    second = predict_all({"towns": [False] * 10})
    second[3] = predict(3, "Paris", question=second[3].question, error="down")
    results = score_predictions([*first, *second])
    low, high = (100 * end for end in difference_interval([1.0] * 8 + [0.0]))
    interval = f"+88.9 [{low:+.1f}, {high:+.1f}]"
    assert compare_systems(results, OURS, DIRECT)[:4] == ("9 (1 failed)", "88.9", "0.0", interval)
    assert compare_systems(results, DIRECT, OURS)[0] == "9 (1 failed)", "whichever system failed"


def test_datasets_have_equal_weights_in_a_comparison():
    first = {"towns": [True] * 9 + [False], "lakes": [True, False] * 4}
    cells = compare_systems(both(first, {"towns": [False] * 10, "lakes": [True, False] * 4}), OURS, DIRECT)
    assert cells[:3] == ("18", "70.0", "25.0")


def test_the_tables_have_a_row_for_each_rival():
    full, cot = System("prompt-r1", "large", "a"), System("cot", "large")
    rows = [*predict_all({"towns": [True] * 9 + [False]}, full), *predict_all({"towns": [False] * 10})]
    rows += predict_all({"towns": [True] * 8 + [False] * 2}, cot)
    main, read = comparison_tables(score_predictions(rows))
    assert re.search(r"direct \(large\) +\| EM +\|.* \| +significant", main)
    assert re.search(r"cot \(large\) +\| EM +\|.*\+10.0 .* \| +within", main)
    assert "| EM read |" in read


def test_a_rival_without_an_answer_keeps_its_row():
    full, failed = System("prompt-r1", "large", "a"), predict(error="down")
    main, _ = comparison_tables(score_predictions([*predict_all({"towns": [True]}, full), failed]))
    assert re.search(r"direct \(large\) +\| EM +\| +0 .* no common question", main)


def test_free_texts_are_compared_by_f1():
    half = predict(answer="Paris Lyon", question=question_of(0, dataset="BookSum", kind="text"), system=OURS)
    results = score_predictions([half, *predict_all({"BookSum": [True]})])
    assert compare_systems(results, OURS, DIRECT)[1:3] == ("66.7", "100.0")
