"""Means, intervals, the paper's tables and comparisons, against independently computed numbers."""

import json
import random
import re
from dataclasses import replace
from statistics import mean

import pytest

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.data.files import kind_of
from prompt_r1.evaluation import paper_numbers
from prompt_r1.evaluation.aggregate import score_predictions
from prompt_r1.evaluation.comparison import Comparison, compare_systems
from prompt_r1.evaluation.paper_tables import Table, paper_tables
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.results_folder import (
    note_preparation,
    results_by_system,
    results_table,
    write_results,
)
from prompt_r1.metrics.statistics import macro_interval, wilson
from tests.evaluation.predictions import DIRECT, predict, predict_all, question_of
from tests.metrics.test_statistics import exact_sign_flip
from tests.support.paths import SHARED

PAPER_TEXT = SHARED / "paper" / "paper_full_text.txt"
DATASETS = (*paper_numbers.TRAINED, *paper_numbers.OUT_OF_DISTRIBUTION)
COT = System("cot", "large")
FULL = System("prompt-r1", "large", "runs/a")


# --- The paper's numbers ----------------------------------------------------------------------------------


@pytest.mark.skipif(not PAPER_TEXT.exists(), reason="the paper's text is not here")
def test_every_number_occurs_in_the_text_of_the_paper():
    rows = []
    for line in PAPER_TEXT.read_text("utf-8").splitlines():
        if line.startswith("| "):
            rows.append(tuple(map(float, re.findall(r"(?<![(+.\d])\d+\.\d\d\b", line))))
    for row in [*paper_numbers.MAIN_RESULTS.values(), *paper_numbers.TRANSFER.values()]:
        assert row in rows
    for row in paper_numbers.ABLATIONS.values():
        assert row[:12] in rows and row[12:] in rows


# --- Means and intervals ----------------------------------------------------------------------------------


def drawn(seed: int, rate: float, count: int = 16) -> dict[str, list[bool]]:
    """Random outcomes of `count` questions of each dataset."""
    rng = random.Random(seed)
    return {name: [rng.random() < rate for _ in range(count)] for name in DATASETS}


def test_repeats_of_a_question_count_as_one_observation():
    """The interval is not narrower if each question is asked five times with the same outcome."""
    once = predict_all({"towns": [True] * 6 + [False] * 4})
    five = [replace(one, sample=sample) for one in once for sample in range(5)]
    rates = [score_predictions(predictions).average(DIRECT, ["towns"], "em") for predictions in (once, five)]
    assert rates[0] == rates[1] and rates[0].n == 10


def test_failed_calls_are_counted_and_do_not_lower_the_mean():
    results = score_predictions([predict(1), predict(2, "Lyon"), predict(3, None, error="HTTP 500")])
    rate = results.average(DIRECT, ["towns"], "em")
    assert (rate.mean, rate.n, rate.errors) == (0.5, 2, 1)
    means = results_by_system(results)["direct"]
    assert (means["n"], means["errors"], means["em"]) == (2, 1, 0.5)


def test_a_table_shows_failed_calls():
    """A mean over fewer questions than its neighbour's is marked with its n and the number of errors."""
    complete = [predict(number, system=COT, setting="c") for number in range(4)]
    incomplete = [predict(number, error="HTTP 500" if number == 3 else "") for number in range(4)]
    [table] = paper_tables(score_predictions([*incomplete, *complete]), {})
    header, _, row = cells_of(table.markdown())[:3]
    assert header[2:] == ["direct", "cot"]
    assert row[2].endswith("] (n 3, 1 errors)") and row[3].endswith("]")


def test_an_average_weights_datasets_equally_and_a_pooled_mean_weights_questions_equally():
    """Two of eight towns and four of four rivers: 5/8 over datasets, 6/12 over questions."""
    rows = predict_all({"towns": [True] * 2 + [False] * 6, "rivers": [True] * 4, "XSum": [True] * 5})
    half = predict(answer="Paris Lyon", question=question_of(5, dataset="XSum", kind="text"))  # F1 is 2/3
    results = score_predictions([*rows, half])
    average = results.average(DIRECT, ["towns", "rivers", "XSum"], "em")  # texts do not report EM
    pooled = results.pooled(DIRECT, ["towns", "rivers"], "em")
    assert (average.mean, average.n, pooled.mean, pooled.n) == (0.625, 12, 0.5, 12)
    assert (pooled.low, pooled.high) == wilson(6, 12)
    questions = {"towns": [1] * 2 + [0] * 6, "rivers": [1] * 4}
    assert (average.low, average.high) == macro_interval(questions)


def test_an_average_over_a_dataset_that_was_not_measured_is_none():
    rows = [*predict_all({"towns": [True], "rivers": [True]}), *predict_all({"towns": [True]}, COT)]
    results = score_predictions(rows)
    assert results.average(COT, ["towns", "rivers"], "em") is None
    assert results.average(DIRECT, ["towns", "rivers"], "em").mean == 1


def test_ssim_is_measured_for_texts_and_the_table_says_when_it_was_not(tmp_path):
    rows = predict_all({"XSum": [True, False], "PopQA": [True, False]})

    def similarity(predictions, answers):
        assert list(predictions) == ["Paris", "Lyon"] and len(answers) == 2
        return [0.9, 0.5]

    with_ssim, without = score_predictions(rows, similarity=similarity), score_predictions(rows)
    assert with_ssim.average(DIRECT, ["XSum"], "ssim").mean == pytest.approx(0.7)
    assert with_ssim.average(DIRECT, ["PopQA"], "ssim") is None
    assert without.average(DIRECT, ["XSum"], "ssim") is None
    texts = []
    for results in (with_ssim, without):
        write_results(tmp_path, results, {})
        texts.append((tmp_path / "tables.md").read_text("utf-8"))
    assert "SSim was not measured" not in texts[0] and "| XSum (n = 2) | SSim | **70.0** [" in texts[0]
    assert "SSim was not measured" in texts[1] and "| SSim |" not in texts[1]


def test_a_text_whose_call_failed_is_not_measured_by_ssim():
    def similarity(predictions, answers):
        return [0.9 if prediction else 0.0 for prediction in predictions]

    text = question_of(7, dataset="XSum", kind="text")
    failed = predict(question=text, answer=None, error="HTTP 500")
    results = score_predictions([*predict_all({"XSum": [True]}), failed], similarity=similarity)
    rate = results.average(DIRECT, ["XSum"], "ssim")
    assert (rate.mean, rate.n, rate.errors) == (0.9, 1, 1)


def test_repeated_answers_are_compared_by_sign_flips_instead_of_mcnemar():
    """Means over repeats, such as 1/2, are not wins or losses."""
    first = [predict(number, sample=sample) for number in range(12) for sample in range(2)]
    second = [
        predict(number, "Paris" if sample else "Lyon", sample=sample)
        for number in range(12)
        for sample in range(2)
    ]
    sides = [(score_predictions(rows), DIRECT) for rows in (first, second)]
    [one] = compare_systems(*sides)
    assert (one.test, one.n, one.difference) == ("sign flip", 12, 0.5) and one.p < 0.005


# --- The layout of the paper ------------------------------------------------------------------------------


def cells_of(text: str) -> list[list[str]]:
    """The cells of each row of the Markdown tables in a text."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]


def test_tables_2_to_5_have_the_layout_and_the_numbers_of_the_paper():
    rows, trained = [], {"runs/a": "gpt-4o-mini", "runs/b": "gpt-oss-20b@http://x/v1"}
    environments = list(trained.values())
    for number, environment in enumerate(environments):
        rows += predict_all(drawn(number, 0.4), System("direct", environment))
        for agent in trained:
            rows += predict_all(drawn(7, 0.8), System("prompt-r1", environment, agent))
    rows += predict_all(drawn(5, 0.1), System("agent-only", agent="runs/a"))
    tables = {}
    for table in paper_tables(score_predictions(rows), trained):
        tables.setdefault(table.title.partition(":")[0], table)  # with the first environment
    assert list(tables) == ["Table 2", "Table 3", "Table 4", "Table 5"]

    wide = cells_of(tables["Table 2"].markdown())
    alone = ["Qwen3-4B, paper", "CoT (Qwen3-4B), paper"]
    assert wide[0] == ["dataset", "metric", "direct", "prompt-r1", "agent-only", *alone]
    hotpot = next(line for line in wide if line[:2] == ["HotpotQA (n = 16)", "EM"])
    assert wide[wide.index(hotpot) + 1] == ["", "EM, paper", "33.59", "44.53", "", "21.09", "18.75"]
    right = sum(drawn(7, 0.8)["HotpotQA"])
    assert hotpot[3].startswith(f"**{100 * right / 16:.1f}** [")  # the best one
    average = next(line for line in wide if line[0].startswith("Average") and line[1] == "EM")
    names = [name for name in paper_numbers.TRAINED if kind_of(name) != "text"]
    assert average[2].startswith(f"{100 * mean(sum(drawn(0, 0.4)[name]) / 16 for name in names):.1f} [")
    assert ["", "EM, paper", "34.89", "44.01", "", "23.70", "22.27"] in wide

    ablations = cells_of(tables["Table 4"].markdown())
    labels = [line[0] for line in ablations[2:]]
    assert labels[::2] == ["w/o Env.", "w/o Agent", "Prompt-R1 (Full)"]
    assert labels[1::2] == [f"{label}, paper" for label in labels[::2]]
    assert ablations[3][1:3] == ["41.41", "43.48"] and "XSum (n = 16) F1" in ablations[0]

    transfer = {line[0]: line for line in cells_of(tables["Table 5"].markdown())}
    squad = transfer[""].index("SQuAD v2 (n = 16) EM")
    home = "trained with gpt-4o-mini, tested with gpt-oss-20b@http://x/v1"
    assert transfer[f"{home}, paper"][squad] == "8.59" and len(transfer) == 1 + 1 + 12
    assert transfer["gpt-4o-mini alone, paper"][squad] == "13.28"


def paper_rows(table: Table) -> dict[tuple[str, ...], dict[str, float]]:
    """The paper's numbers in a table: by row, then by column."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for (row, column), entry in table.entries.items():
        if entry.paper is not None:
            found.setdefault(row, {})[" ".join(column)] = entry.paper
    return found


def test_the_papers_numbers_are_shown_with_its_environments_only():
    """Those of GPT-4o-mini were once printed under any environment."""
    rows = []
    for environment in ("llama", "gpt-4o-mini", "qwen3-4b@http://x/v1", "gpt-4o-mini,llama"):
        for method in ("direct", "cot", "opro"):
            rows += predict_all(drawn(1, 0.5), System(method, environment))
        rows += predict_all(drawn(1, 0.5), System("prompt-r1", environment, "runs/a"))
    rows += predict_all(drawn(1, 0.5), System("sft", agent="runs/sft"))
    tables = paper_tables(score_predictions(rows), {})
    numbers = {table.title: paper_rows(table) for table in tables}
    hotpot = ("HotpotQA (n = 16)", "EM")
    ours = {"direct": 33.59, "cot": 42.97, "opro": 34.38, "prompt-r1": 44.53}
    alone = {"Qwen3-4B, paper": 21.09, "CoT (Qwen3-4B), paper": 18.75}
    at = "Table 2: results, environment"
    assert numbers[f"{at} llama"][hotpot] == {"sft": 23.44}  # Qwen3-4B's, which needs no environment
    assert numbers[f"{at} gpt-4o-mini,llama"][hotpot] == {"sft": 23.44}
    assert numbers[f"{at} qwen3-4b@http://x/v1"][hotpot] == {"direct": 21.09, "cot": 18.75, "sft": 23.44}
    assert numbers[f"{at} gpt-4o-mini"][hotpot] == {**ours, "sft": 23.44, **alone}
    ablations = {title: found for title, found in numbers.items() if title.startswith("Table 4")}
    assert len(ablations) == 4
    assert [title for title, found in ablations.items() if found] == [
        "Table 4: ablations, environment gpt-4o-mini"
    ]
    [transfer] = [paper_rows(table) for table in tables if table.title.startswith("Table 5")]
    assert transfer.keys() == {("gpt-4o-mini alone",)}, "it is unknown how runs/a was trained"


def test_a_backslash_before_a_pipe_does_not_end_the_cell():
    """GitHub reads two backslashes as one, so the pipe after them needs one of its own."""
    lines = markdown_table([r"a\|b"], [[r"c\\|"]]).splitlines()
    assert lines[::2] == [r"| a\\\|b |", r"| c\\\\\| |"]


HOSTILE = "t\x1b[2J\x1b]0;owned\a\u202eabc\u200b\x85\u2028\nx|y"


def test_names_of_datasets_and_agents_cannot_move_the_cursor_or_reorder_text(tmp_path):
    """They come from files of others, and are shown by terminals and editors."""
    full = System("prompt-r1", "large", f"runs/{HOSTILE}")
    rows = [*predict_all({HOSTILE: [True] * 8, "b": [True]}, full)]
    rows += predict_all({HOSTILE: [False] * 8}, System("prompt-r1", "large", "runs/z"))
    rows += predict_all({HOSTILE: [False] * 8, "b": [False]})
    text = write_results(tmp_path, score_predictions(rows), {})
    written = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert "tables.md" in written
    for name, content in [("printed", text), *written.items()]:
        hidden = {letter for letter in content if not letter.isprintable() and letter != "\n"}
        assert not hidden, f"{name}: {hidden}"
        assert name.endswith(".json") or "owned" in content
    for table in (written["results.md"], written["tables.md"]):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert lines and all(line.endswith("|") for line in lines)


# --- Comparisons ------------------------------------------------------------------------------------------


def compare(first: dict[str, list[bool]], second: dict[str, list[bool]]) -> list[Comparison]:
    return compare_systems(*[(score_predictions(predict_all(side)), DIRECT) for side in (first, second)])


def test_the_pooled_p_is_about_the_pooled_difference():
    """A raw McNemar test counted 30 wins against 8 losses (p = 0.0005) although the second system was better
    by 28 points in the mean of the datasets."""
    first = {"towns": [True] * 30 + [False] * 62, "rivers": [False] * 9}
    second = {"towns": [False] * 92, "rivers": [True] * 8 + [False]}
    pooled = compare(first, second)[-1]
    assert pooled.difference == pytest.approx((30 / 92 - 8 / 9) / 2) and pooled.test == "sign flip"
    smaller = {"towns": [True] * 6 + [False] * 14, "rivers": [False] * 4}
    other = {"towns": [False] * 20, "rivers": [True] * 3 + [False]}
    pooled = compare(smaller, other)[-1]
    assert pooled.p == pytest.approx(exact_sign_flip([1 / 20] * 6 + [-1 / 4] * 3), abs=0.015)
    assert pooled.p > 0.2  # McNemar's for six wins and three losses is 0.51, in the other direction


def test_the_pooled_test_of_datasets_of_equal_size_is_mcnemars():
    first = {"towns": [True] * 9 + [False] * 11, "rivers": [True] * 8 + [False] * 12}
    second = {"towns": [False] * 20, "rivers": [False] * 20}
    pooled = compare(first, second)[-1]
    assert (pooled.test, pooled.p) == ("McNemar", pytest.approx(2 / 2**17))


# --- The folder -------------------------------------------------------------------------------------------


def test_an_evaluation_folder_contains_every_file_even_if_no_question_was_answered(tmp_path):
    text = write_results(tmp_path, score_predictions([predict(error="down")]), {})
    assert text.splitlines()[1].split() == ["direct", "0", "1"]  # n and errors
    assert "| direct | towns | 0 | 1 | – |" in (tmp_path / "results.md").read_text("utf-8")
    assert {"results.md", "results.json", "tables.md", "comparisons.md"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_a_damaged_note_of_preparation_is_replaced(tmp_path):
    for damaged in (bytes(range(256)), b"[]", b'{"direct'):
        (tmp_path / "preparation.json").write_bytes(damaged)
        note_preparation(tmp_path, DIRECT, {"calls": 3})
        assert json.loads((tmp_path / "preparation.json").read_text()) == {"direct (large)": {"calls": 3}}


def test_the_users_metric_is_one_more_column_only_where_it_was_measured(tmp_path):
    predictions = [predict(1), predict(2, "Lyon"), predict(3, None, error="HTTP 500")]
    without = score_predictions(predictions)
    assert "| own |" not in results_table(without)
    assert "own" not in next(iter(results_by_system(without).values()))
    seen = []

    def own(prediction, question):
        seen.append((prediction, question.answers))
        return len(prediction) / 8

    results = score_predictions(predictions, own=own)
    assert seen == [("Paris", ("Paris", "P.")), ("Lyon", ("Paris", "P."))]  # once each; not for failed calls
    [shown] = results_by_system(results).values()
    assert shown["own"] == pytest.approx((5 + 4) / 16)
    header, _, row = results_table(results).splitlines()[:3]
    assert header.split(" | ")[8] == "own" and row.split(" | ")[8].startswith("0.562 [")
    assert re.search(r"^method .* own ", write_results(tmp_path, results, {}), re.M)
