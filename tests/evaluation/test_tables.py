"""Means, intervals, the paper's tables and the comparisons, against numbers worked out otherwise."""

import csv
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from statistics import mean

import pytest

from prompt_r1.evaluation import paper_numbers
from prompt_r1.evaluation.aggregate import score_predictions
from prompt_r1.evaluation.comparison import compare, comparison_table, verdict
from prompt_r1.evaluation.cost_plot import Point, cost_plot
from prompt_r1.evaluation.paper_tables import paper_tables
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.results_folder import results_list, results_object, write_results
from prompt_r1.evaluation.tables import Entry, Table, comma_separated, every_cell, latex, markdown
from prompt_r1.metrics.statistics import macro_interval, wilson
from tests.evaluation.test_predictions import answer
from tests.paths import SHARED

PAPER_TEXT = SHARED / "paper" / "paper_full_text.txt"
DATASETS = (*paper_numbers.TRAINED, *paper_numbers.OUT_OF_DISTRIBUTION)


# --- The paper's numbers ----------------------------------------------------------------------------------


def test_the_papers_averages_are_the_means_of_its_columns():
    for datasets, metric in paper_numbers.AVERAGES:
        for column in paper_numbers.COLUMNS:
            numbers = [paper_numbers.main_result(column, name, metric) for name in datasets]
            found = mean(number for number in numbers if number is not None)
            assert found == pytest.approx(paper_numbers.average(column, datasets, metric), abs=0.0101)


def test_the_papers_tables_agree_where_they_overlap():
    for name in DATASETS:
        for metric in paper_numbers.metrics_of(name):
            alone, full = (
                paper_numbers.main_result(column, name, metric) for column in ("GPT-4o-mini", "Prompt-R1")
            )
            assert paper_numbers.ablation("w/o Agent", name, metric) == alone
            assert paper_numbers.ablation("Prompt-R1 (Full)", name, metric) == full
            if name in paper_numbers.OUT_OF_DISTRIBUTION:
                assert paper_numbers.transfer("", "GPT-4o-mini", name, metric) == alone
                assert paper_numbers.transfer("GPT-4o-mini", "GPT-4o-mini", name, metric) == full


@pytest.mark.skipif(not PAPER_TEXT.exists(), reason="the paper's text is not here")
def test_every_number_stands_in_the_papers_text():
    rows = [re.findall(r"(?<![(+.\d])\d+\.\d\d\b", line)
            for line in PAPER_TEXT.read_text("utf-8").splitlines() if line.startswith("| ")]  # fmt: skip
    rows = [tuple(map(float, row)) for row in rows]
    for row in [
        *paper_numbers.MAIN_RESULTS.values(),
        *paper_numbers.AVERAGES.values(),
        *paper_numbers.TRANSFER.values(),
    ]:
        assert row in rows
    for row in paper_numbers.ABLATIONS.values():
        assert row[:12] in rows and row[12:] in rows


# --- Means and intervals ----------------------------------------------------------------------------------


def scored(rights: dict[str, list[bool]], *, method: str = "direct", **others: object) -> list:
    """Predictions by dataset: right or wrong, one a question."""
    return [
        answer(number, "Paris" if right else "Lyon", method=method, setting=method, dataset=name,
               kind="text" if name in paper_numbers.TEXTS else "qa", **others)
        for name, row in rights.items()
        for number, right in enumerate(row)
    ]  # fmt: skip


def drawn(seed: int, rate: float, count: int = 16) -> dict[str, list[bool]]:
    rng = random.Random(seed)
    return {name: [rng.random() < rate for _ in range(count)] for name in DATASETS}


def test_repeats_of_a_question_are_one_observation():
    """Asking each question five times with the same outcome makes the interval no narrower."""
    once = scored({"towns": [True] * 6 + [False] * 4})
    five = [answer(int(one.id[1:]), one.prediction, sample=s) for one in once for s in range(5)]
    cells = [
        score_predictions(rows).cell(System(rows[0].method, "large"), "towns", "em") for rows in (once, five)
    ]
    assert cells[0] == cells[1] and cells[0].n == 10


def test_failed_calls_lower_no_mean_and_are_counted():
    scores = score_predictions([answer(1), answer(2, "Lyon"), answer(3, None, error="HTTP 500")])
    cell = scores.cell(System("direct", "large"), "towns", "em")
    assert (cell.mean, cell.n, cell.errors) == (0.5, 2, 1)
    assert (
        results_object(scores)["direct"] | {"n": 2, "errors": 1, "em": 0.5}
        == results_object(scores)["direct"]
    )


def test_failed_calls_are_told_in_every_form_of_a_table():
    """A mean over fewer questions than its neighbour's is marked with its n and the number of errors."""
    whole = [answer(n, method="cot", setting="c") for n in range(4)]
    broken = [answer(n, error="HTTP 500" if n == 3 else "") for n in range(4)]
    [table] = paper_tables(score_predictions([*broken, *whole]), {})
    heads, _, row = lines_of(markdown(table))[:3]
    assert heads[2:] == ["direct", "cot"]
    assert row[2].endswith("] (n 3, 1 errors)") and row[3].endswith("]")
    assert "]} (n 3, 1 errors) & " in latex(table)
    cells = {cell["column"]: (cell["n"], cell["errors"]) for cell in csv.DictReader(
        every_cell([table]).splitlines()) if cell["row"].endswith("EM")}  # fmt: skip
    assert cells == {"direct": ("3", "1"), "cot": ("4", "0")}


def test_an_average_weighs_datasets_equally_and_the_pooled_mean_weighs_questions():
    """Two of eight towns and four of four rivers: 5/8 over datasets, 6/12 over questions."""
    rows = scored({"towns": [True] * 2 + [False] * 6, "rivers": [True] * 4, "XSum": [True] * 5})
    half = answer(5, "Paris Lyon", method="direct", setting="direct", dataset="XSum", kind="text")  # F1 2/3
    scores = score_predictions([*rows, half])
    [system] = scores.systems
    average = scores.average(system, ["towns", "rivers", "XSum"], "em")  # texts do not report EM
    pooled = scores.pooled(system, ["towns", "rivers"], "em")
    assert (average.mean, average.n, pooled.mean, pooled.n) == (0.625, 12, 0.5, 12)
    assert (pooled.low, pooled.high) == wilson(6, 12)
    questions = {"towns": [1] * 2 + [0] * 6, "rivers": [1] * 4}
    assert (average.low, average.high) == macro_interval(questions)
    main = scores.main(system, ["towns", "rivers", "XSum"])  # EM, EM and F1
    assert (main.mean, main.n) == (pytest.approx((0.25 + 1 + (5 + 2 / 3) / 6) / 3), 18)


def test_an_average_over_a_dataset_that_was_not_measured_is_none():
    rows = [*scored({"towns": [True], "rivers": [True]}), *scored({"towns": [True]}, method="cot")]
    scores = score_predictions(rows)
    assert scores.average(System("cot", "large"), ["towns", "rivers"], "em") is None
    assert scores.average(System("direct", "large"), ["towns", "rivers"], "em").mean == 1


def test_zeros_everywhere_are_no_certainty():
    """A bootstrap of zeros gives [0, 0]; with 2 × 16 questions a rate of 10 % can hide behind them."""
    scores = score_predictions(scored({"towns": [False] * 16, "rivers": [False] * 16}))
    cell = scores.average(System("direct", "large"), ["towns", "rivers"], "em")
    assert cell.mean == 0 and 0.08 < cell.high < 0.13


def test_ssim_is_of_texts_only_and_its_absence_is_told():
    rows = scored({"XSum": [True, False], "PopQA": [True, False]})

    def similarity(predictions, answers):
        assert list(predictions) == ["Paris", "Lyon"] and len(answers) == 2
        return [0.9, 0.5]

    with_it, without = score_predictions(rows, similarity=similarity), score_predictions(rows)
    system = System("direct", "large")
    assert with_it.cell(system, "XSum", "ssim").mean == pytest.approx(0.7)
    assert with_it.cell(system, "PopQA", "ssim") is None and without.cell(system, "XSum", "ssim") is None
    told = ["\n".join(map(markdown, paper_tables(scores, {}))) for scores in (with_it, without)]
    assert "SSim was not measured" not in told[0] and "| XSum (n = 2) | SSim | **70.0** [" in told[0]
    assert "SSim was not measured" in told[1] and "| SSim |" not in told[1]


def test_repeats_are_compared_by_sign_flips_not_by_mcnemar():
    """Means over repeats are no wins and losses: McNemar's test would not take 1/2."""
    first = [answer(n, sample=s) for n in range(12) for s in range(2)]
    second = [answer(n, "Paris" if s else "Lyon", sample=s) for n in range(12) for s in range(2)]
    sides = [score_predictions(rows) for rows in (first, second)]
    [one] = compare(*((side, side.systems[0]) for side in sides))
    assert (one.test, one.n, one.difference) == ("sign flip", 12, 0.5) and one.p < 0.005


# --- The paper's layout -----------------------------------------------------------------------------------


def lines_of(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]


def test_tables_2_to_5_have_the_papers_layout_and_its_numbers_beside_ours():
    rows, trained = [], {"runs/a": "gpt-4o-mini", "runs/b": "gpt-oss-20b@http://x/v1"}
    environments = list(trained.values())
    for number, environment in enumerate(environments):
        rows += scored(drawn(number, 0.4), environment=environment)
        for agent in trained:
            rows += scored(drawn(7, 0.8), method="prompt-r1", environment=environment, agent=agent)
    rows += scored(drawn(5, 0.1), method="agent-only", environment="", agent="runs/a")
    tables = {table.name: table for table in paper_tables(score_predictions(rows), trained)}
    assert {"table2", "table3", "table4", "table5"} <= set(tables)

    wide = lines_of(markdown(tables["table2"]))
    assert wide[0] == ["dataset", "metric", "direct", "prompt-r1", "agent-only"]
    hotpot = next(line for line in wide if line[:2] == ["HotpotQA (n = 16)", "EM"])
    assert wide[wide.index(hotpot) + 1] == ["", "EM, paper", "33.59", "44.53", ""]
    right = sum(drawn(7, 0.8)["HotpotQA"])
    assert hotpot[3].startswith(f"**{100 * right / 16:.1f}** [")  # the best one
    average = next(line for line in wide if line[0].startswith("Average") and line[1] == "EM")
    names = [name for name in paper_numbers.TRAINED if name not in paper_numbers.TEXTS]
    assert average[2].startswith(f"{100 * mean(sum(drawn(0, 0.4)[name]) / 16 for name in names):.1f} [")
    assert ["", "EM, paper", "34.89", "44.01", ""] in wide

    ablations = lines_of(markdown(tables["table4"]))
    assert [line[0] for line in ablations[2:]] == [
        "w/o Env.", "w/o Env., paper", "w/o Agent", "w/o Agent, paper", "Prompt-R1 (Full)",
        "Prompt-R1 (Full), paper",
    ]  # fmt: skip
    assert ablations[3][1:3] == ["41.41", "43.48"] and "XSum (n = 16) F1" in ablations[0]

    transfer = {line[0]: line for line in lines_of(markdown(tables["table5"]))}
    squad = transfer[""].index("SQuAD v2 (n = 16) EM")
    home = "trained with gpt-4o-mini, tested with gpt-oss-20b@http://x/v1"
    assert transfer[f"{home}, paper"][squad] == "8.59" and len(transfer) == 1 + 1 + 12
    assert transfer["gpt-4o-mini alone, paper"][squad] == "13.28"


def test_csv_and_latex_say_what_the_markdown_says():
    rows = scored(drawn(1, 0.5)) + scored(drawn(2, 0.9), method="prompt-r1", agent="runs/a_1")
    table = paper_tables(score_predictions(rows), {"runs/a_1": "large"})[0]
    values = {tuple(row[:2]): row[2:] for row in csv.reader(comma_separated(table).splitlines())}
    right = sum(drawn(1, 0.5)["GSM8K"])
    assert float(values["GSM8K (n = 16)", "EM"][0]) == pytest.approx(100 * right / 16, abs=1e-3)
    assert values["", "EM, paper"][1] == "44.01"  # the last such line is the average's
    text = latex(table)
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    assert all(line.count(" & ") == 3 for line in body.splitlines()[1:])
    assert rf"{100 * right / 16:.2f} {{\tiny [" in text and "runs/a_1" not in text


AWKWARD = r"50%|a_b & {c} #1 $2 ~x ^y \z"


def test_names_do_not_break_the_columns_of_markdown():
    table = Table("t", "T", ("dataset",), [(AWKWARD,)], [("a|b",)], {((AWKWARD,), ("a|b",)): Entry(number=1)})
    lines = markdown(table).splitlines()[2:]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}
    assert r"a\|b" in lines[0] and r"50%\|a_b" in lines[2]


def test_a_pipe_in_a_datasets_or_agents_name_does_not_break_the_lists():
    rows = [*scored({"a|b": [True, False], "c": [True]}, method="prompt-r1", agent="runs/x|y"),
            *scored({"a|b": [True, False], "c": [True]}, method="prompt-r1", agent="runs/z"),
            *scored({"a|b": [False, False], "c": [True]})]  # fmt: skip
    scores = score_predictions(rows)
    [full, _, rival] = scores.systems
    listed = results_list(scores), comparison_table(compare((scores, full), (scores, rival)), "1|2", "2")
    for text in listed:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines()}) == 1
        assert r"| a\|b |" in text
    assert r"runs/x\|y" in listed[0] and r"| 1\|2 |" in listed[1]


def test_names_are_escaped_everywhere_in_latex():
    """An unescaped %, say, would comment out the rest of a row."""
    row, column = (AWKWARD,), (AWKWARD,)
    text = latex(Table("t", AWKWARD, (AWKWARD,), [row], [column], {(row, column): Entry(number=1, paper=2)}))
    escaped = r"50\%|a\_b \& \{c\} \#1 \$2 \textasciitilde{}x \textasciicircum{}y \textbackslash{}z"
    assert text.count(escaped) == 5  # caption, head, column, and the row twice: ours and the paper's
    assert "50%" not in text


# --- Which differences are real -------------------------------------------------------------------------


def versus(first: list[bool], second: list[bool]):
    sides = [score_predictions(scored({"towns": side})) for side in (first, second)]
    return compare(*((side, side.systems[0]) for side in sides))[0]


def test_the_papers_gain_on_popqa_is_within_what_128_questions_cannot_show():
    """28.13 against 25.78: 36 against 33 right answers; with no answer lost, McNemar's exact p is 0.25."""
    one = versus([True] * 36 + [False] * 92, [True] * 33 + [False] * 95)
    assert one.difference == pytest.approx(0.0234, abs=1e-4) and one.p == pytest.approx(0.25)
    assert one.too_small and verdict(one) == "n too small"
    assert one.detectable == pytest.approx(2.8016 * math.sqrt(3 / 128 / 128), rel=1e-3)


def test_the_papers_gain_on_2wiki_is_real_even_with_seven_losses():
    one = versus([True] * 62 + [False] * 66, [False] * 26 + [True] * 36 + [True] * 7 + [False] * 59)
    assert one.difference == pytest.approx(19 / 128) and one.p == pytest.approx(0.0013, abs=2e-4)
    assert verdict(one) == "real"


def test_holm_is_over_the_datasets_and_the_pooled_line_weighs_them_equally():
    first = {"towns": [True] * 12 + [False] * 20, "rivers": [True] * 30 + [False] * 34}
    second = {"towns": [True] * 3 + [False] * 29, "rivers": [True] * 29 + [False] * 35}
    sides = [score_predictions(scored(side)) for side in (first, second)]
    rivers, towns, pooled = compare(*((side, side.systems[0]) for side in sides))
    assert towns.p == pytest.approx(2 / 2**9) and towns.p_holm == pytest.approx(2 * towns.p)
    assert rivers.p == rivers.p_holm == 1
    assert pooled.n == 96 and pooled.difference == pytest.approx((9 / 32 + 1 / 64) / 2)
    assert pooled.low < pooled.difference < pooled.high


def test_the_plot_is_a_picture_of_the_points():
    points = [Point("direct & co", 1.0, 0.2, 0.1, 0.3), Point("agent", 3.7, 0.9, 0.8, 0.95)]
    root = ElementTree.fromstring(cost_plot(points, cost_label="calls", quality_label="EM"))
    circles = [item for item in root.iter() if item.tag.endswith("circle")]
    (x1, y1), (x2, y2) = [(float(item.get("cx")), float(item.get("cy"))) for item in circles]
    assert x1 < x2 and y1 > y2
    assert "direct & co  20.0" in [item.text for item in root.iter() if item.tag.endswith("text")]


def test_an_evaluation_folder_holds_every_file_even_when_nothing_was_answered(tmp_path):
    text = write_results(tmp_path, score_predictions([answer(error="down")]), {}, tables=False)
    assert "| direct | towns | 0 | 1 | – |" in text
    assert {"results.md", "results.json", "tables.md", "cells.csv", "comparisons.md", "cost.svg"} <= {
        path.name for path in tmp_path.iterdir()
    }
