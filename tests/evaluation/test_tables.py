"""Means, intervals and the paper's tables, against independent ones."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import pytest

from prompt_r1.data.datasets import OUT_OF_DISTRIBUTION, TRAINED, kind_of_dataset
from prompt_r1.evaluation.intervals import mean_interval, wilson
from prompt_r1.evaluation.paper_numbers import Column, load_numbers
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.scores import score_predictions
from prompt_r1.evaluation.tables import paper_tables, terminal_table, write_results
from prompt_r1.spending import Spending
from tests.support.paths import SHARED
from tests.support.predictions import DIRECT, predict, predict_all, question_of

PAPER_TEXT = SHARED / "paper" / "paper_full_text.txt"
DATASETS = (*TRAINED, *OUT_OF_DISTRIBUTION)
COT = System("cot", "large")


@pytest.mark.skipif(not PAPER_TEXT.exists(), reason="the paper's text is not here")
def test_every_number_occurs_in_the_text_of_the_paper():
    rows = []
    for line in PAPER_TEXT.read_text("utf-8").splitlines():
        if line.startswith("| "):
            rows.append(tuple(map(float, re.findall(r"(?<![(+.\d])\d+\.\d\d\b", line))))
    numbers = load_numbers()
    columns = list(numbers)

    for place in numbers[columns[0]]:  # Tables 2 and 3
        assert tuple(numbers[column][place] for column in columns[:10]) in rows
    for method in ("agent-only", "untrained"):  # Table 4
        column = Column(method, "GPT-4o-mini", trained_with="GPT-4o-mini")
        for datasets in (DATASETS[:6], DATASETS[6:]):
            assert tuple(numbers[column][place] for place in places_of(datasets)) in rows
    for column in columns[12:]:  # Table 5
        assert tuple(numbers[column][place] for place in places_of(OUT_OF_DISTRIBUTION)) in rows


def places_of(datasets: Sequence[str]) -> list[tuple[str, str]]:
    """The datasets with the two metrics that the paper reports of each."""
    metrics = {name: ("f1", "ssim") if kind_of_dataset(name) == "text" else ("em", "f1") for name in datasets}
    return [(name, metric) for name in datasets for metric in metrics[name]]


def drawn(seed: int, rate: float, count: int = 16) -> dict[str, list[bool]]:
    """Random outcomes of `count` questions of each dataset."""
    rng = random.Random(seed)
    return {name: [rng.random() < rate for _ in range(count)] for name in DATASETS}


def test_repeats_of_a_question_count_as_one_observation():
    """The interval is not narrower if each question is asked five times with the same outcome."""
    once = predict_all({"towns": [True] * 6 + [False] * 4})
    five = [replace(one, sample=sample) for one in once for sample in range(5)]
    rates = [
        score_predictions(predictions).macro_average(DIRECT, ["towns"], "em") for predictions in (once, five)
    ]
    assert rates[0] == rates[1] and rates[0].n == 10
    assert score_predictions(five).means[DIRECT].n == 10
    differing = score_predictions([predict(1), predict(1, "Lyon", sample=1)])
    assert differing.scores(DIRECT, ["towns"], "em") == [0.5]


def test_failed_calls_are_counted_and_do_not_lower_the_mean():
    results = score_predictions([predict(1), predict(2, "Lyon"), predict(3, None, error="HTTP 500")])
    rate = results.macro_average(DIRECT, ["towns"], "em")
    assert (rate.mean, rate.n) == (0.5, 2)
    means = results.micro_means(DIRECT, ["towns"])
    assert (means.n, means.errors, means.rates["em"].mean) == (2, 1, 0.5)


def test_a_dataset_of_several_kinds_has_the_same_table_in_any_order():
    """A bug: the kind of its first question decided whether it had a row of EM."""
    both = [predict(question=question_of(number, kind=kind)) for number, kind in enumerate(("qa", "text"))]
    tables = [paper_tables(score_predictions(order), {}) for order in (both, both[::-1])]
    assert tables[0] == tables[1] and "| EM " in tables[0][0] and "| F1 " in tables[0][0]


def test_a_table_shows_failed_calls():
    """A mean over fewer questions than its neighbour's is marked with its n."""
    complete = [predict(number, system=COT) for number in range(4)]
    incomplete = [predict(number, error="HTTP 500" if number == 3 else "") for number in range(4)]
    [table] = paper_tables(score_predictions([*incomplete, *complete]), {})
    header, _, row = cells_of(table)[:3]
    assert header[2:] == ["direct", "cot"]
    assert row[2].endswith("] (n 3)") and row[3].endswith("]")


def test_an_average_weights_datasets_equally_and_a_pooled_mean_weights_questions_equally():
    """Two of eight towns and four of four rivers: 5/8 over datasets, 6/12 over questions."""
    rows = predict_all({"towns": [True] * 2 + [False] * 6, "rivers": [True] * 4, "XSum": [True] * 5})
    half = predict(answer="Paris Lyon", question=question_of(5, dataset="XSum", kind="text"))  # F1 is 2/3
    results = score_predictions([*rows, half])
    average = results.macro_average(DIRECT, ["towns", "rivers", "XSum"], "em")  # texts do not report EM
    pooled = results.micro_means(DIRECT, ["towns", "rivers"])
    rate = pooled.rates["em"]
    assert (average.mean, average.n, rate.mean, pooled.n) == (0.625, 12, 0.5, 12)
    assert (rate.low, rate.high) == wilson(0.5, 12)
    towns, rivers = [1] * 2 + [0] * 6, [1] * 4
    assert (average.low, average.high) == mean_interval([towns, rivers])


def test_an_average_over_a_dataset_that_was_not_measured_is_none():
    rows = [*predict_all({"towns": [True], "rivers": [True]}), *predict_all({"towns": [True]}, COT)]
    results = score_predictions(rows)
    assert results.macro_average(COT, ["towns", "rivers"], "em") is None
    assert results.macro_average(DIRECT, ["towns", "rivers"], "em").mean == 1


def test_ssim_is_measured_for_texts_and_the_table_says_when_it_was_not(tmp_path):
    rows = predict_all({"XSum": [True, False], "PopQA": [True, False]})

    def similarity(predictions, answers, *, official):
        assert list(predictions) == ["Paris", "Lyon"] and len(answers) == 2 and not official
        return [0.9, 0.5]

    encoder = SimpleNamespace(similarity=similarity)
    with_ssim, without = score_predictions(rows, encoder=encoder), score_predictions(rows)
    assert with_ssim.macro_average(DIRECT, ["XSum"], "ssim").mean == pytest.approx(0.7)
    assert with_ssim.macro_average(DIRECT, ["PopQA"], "ssim") is None
    assert without.macro_average(DIRECT, ["XSum"], "ssim") is None
    texts = []
    for results in (with_ssim, without):
        write_results(tmp_path, results, {})
        texts.append((tmp_path / "tables.md").read_text("utf-8"))
    assert "SSim was not measured" not in texts[0]
    assert any(row[:2] == ["XSum (n = 2)", "SSim"] and "**70.0** [" in row[2] for row in cells_of(texts[0]))
    assert "SSim was not measured" in texts[1] and "| SSim " not in texts[1]


def cells_of(text: str) -> list[list[str]]:
    """The cells of each row of the Markdown tables in a text."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]


def titled(tables: list[str]) -> dict[str, list[list[str]]]:
    """The cells of each table by its title."""
    return {table.splitlines()[0].removeprefix("### "): cells_of(table) for table in tables}


def below(cells: list[list[str]], *label: str) -> dict[str, str]:
    """The cells of the row below the one with this label, by the names of their columns."""
    [place] = [number for number, row in enumerate(cells) if row[: len(label)] == list(label)]
    return dict(zip(cells[0], cells[place + 1], strict=True)) if place + 1 < len(cells) else {}


def test_tables_2_to_5_have_the_numbers_of_the_paper_below_ours():
    rows, trained = [], {"runs/a": "gpt-4o-mini", "runs/b": "gpt-oss-20b@http://x/v1"}
    environments = list(trained.values())
    for number, environment in enumerate(environments):
        rows += predict_all(drawn(number, 0.4), System("direct", environment))
        for agent in trained:
            rows += predict_all(drawn(7, 0.8), System("prompt-r1", environment, agent))
    rows += predict_all(drawn(5, 0.1), System("agent-only", agent="runs/a"))
    rows += predict_all(drawn(6, 0.1), System("untrained", environments[0], "start"))
    tables = titled(paper_tables(score_predictions(rows), trained))
    assert [title[:7] for title in tables] == ["Table 2", "Table 3"] * 2 + ["Table 5"]

    wide = tables["Table 2: results, environment gpt-4o-mini"]
    full, other = "prompt-r1 (runs/a)", "prompt-r1 (runs/b)"
    assert wide[0] == ["dataset", "metric", "direct", full, other, "agent-only", "untrained"]
    hotpot = next(line for line in wide if line[:2] == ["HotpotQA (n = 16)", "EM"])
    right = sum(drawn(7, 0.8)["HotpotQA"])
    assert hotpot[3].startswith(f"**{100 * right / 16:.1f}** [")  # the best one
    paper = below(wide, "HotpotQA (n = 16)", "EM")
    assert (paper["direct"], paper[full], paper["agent-only"]) == ("33.59", "44.53", "21.88")
    assert (paper["untrained"], paper[other]) == ("20.31", ""), "the paper's was trained with gpt-4o-mini"
    average = next(line for line in wide if line[0].startswith("Average") and line[1] == "EM")
    names = [name for name in TRAINED if kind_of_dataset(name) != "text"]
    assert average[2].startswith(f"{100 * mean(sum(drawn(0, 0.4)[name]) / 16 for name in names):.1f} [")
    assert ["", "EM, paper", "34.89", "44.01"] in [line[:4] for line in wide]

    [transfer] = [cells for title, cells in tables.items() if title.startswith("Table 5: transfer")]
    assert any(
        "runs/a was trained with gpt-4o-mini" in title and "runs/b was trained with" in title
        for title in tables
    )
    squad = below(transfer, "SQuAD v2 (n = 16)", "EM")
    assert squad[f"prompt-r1 ({environments[1]}, runs/a)"] == "8.59" and len(squad) == 2 + 6
    assert squad["direct (gpt-4o-mini)"] == "13.28"


def test_the_papers_numbers_are_shown_with_its_environments_only():
    """Those of GPT-4o-mini were once printed under any environment, and under names that contain its own."""
    some = {"HotpotQA": [True, False] * 8}
    rows, others = [], ("llama", "gpt-4o-mini,llama", "gpt-4o-mini-search", "hf:my-qwen3-4b")
    for environment in (*others, "gpt-4o-mini", "Qwen/Qwen3-4B@http://x/v1"):
        for method in ("direct", "cot", "opro"):
            rows += predict_all(some, System(method, environment))
        rows += predict_all(some, System("prompt-r1", environment, "runs/a"))
    rows += predict_all(some, System("sft", agent="runs/sft"))
    tables = titled(paper_tables(score_predictions(rows), {}))

    def numbers(environment: str) -> dict[str, str]:
        cells = tables[f"Table 2: results, environment {environment}"]
        found = below(cells, "HotpotQA (n = 16)", "EM")
        return {name: text for name, text in found.items() if text and name not in ("dataset", "metric")}

    alone = {"sft": "23.44"}  # Qwen3-4B's, which needs no environment
    ours = {"direct": "33.59", "cot": "42.97", "opro": "34.38", "prompt-r1": "44.53"}
    assert all(numbers(other) == alone for other in others)
    assert numbers("Qwen/Qwen3-4B@http://x/v1") == {"direct": "21.09", "cot": "18.75", **alone}
    assert numbers("gpt-4o-mini") == {**ours, **alone}


HOSTILE = "t\x1b[2J\x1b]0;owned\a\u202eabc\u200b\x85\u2028\nx|y"


def test_names_of_datasets_and_agents_cannot_move_the_cursor_or_reorder_text(tmp_path):
    """The names come from files of other people, and terminals and editors show them."""
    full = System("prompt-r1", "large", f"runs/{HOSTILE}")
    rows = [*predict_all({HOSTILE: [True] * 8, "b": [True]}, full)]
    rows += predict_all({HOSTILE: [False] * 8}, System("prompt-r1", "large", "runs/z"))
    rows += predict_all({HOSTILE: [False] * 8, "b": [False]})
    results = score_predictions(rows)
    write_results(tmp_path, results, {})
    text = terminal_table(results)
    written = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert written.keys() == {"tables.md", "results.json"}
    for name, content in [("printed", text), *written.items()]:
        hidden = {letter for letter in content if not letter.isprintable() and letter != "\n"}
        assert not hidden, f"{name}: {hidden}"
    lines = [line for line in written["tables.md"].splitlines() if line.startswith("|")]
    assert lines and all(line.endswith("|") for line in lines)


def test_sm_stands_beside_em_so_that_a_sentence_with_the_answer_is_seen(tmp_path):
    """EM alone gives 0 to an environment that knows the answers but writes sentences."""
    rows = [predict(number, "The town is Paris.") for number in range(8)]
    results = score_predictions(rows)
    write_results(tmp_path, results, {})
    text = terminal_table(results)
    assert text.splitlines()[0].split()[:4] == ["method", "n", "EM", "SM"]
    tables = cells_of((tmp_path / "tables.md").read_text("utf-8"))
    direct = next(row for row in tables if row[0] == "direct")
    assert direct[4].startswith("0.000 [") and direct[5].startswith("1.000 [")
    assert [row[1] for row in tables if row[0] == "towns (n = 8)"] == ["EM", "SM", "F1"]


def test_a_mean_em_over_free_texts_says_how_many_there_are(tmp_path):
    """A bug: the EM of 0 of free texts halved the mean of the terminal without a word."""
    short, texts = {"towns": [True] * 3}, {"XSum": [True]}
    line = "EM of a free text (1 of the 4 questions) is 0 unless every word is right."
    for rows, lines in [(short, []), (short | texts, [line])]:
        results = score_predictions(predict_all(rows))
        write_results(tmp_path, results, {})
        for shown in (terminal_table(results), (tmp_path / "tables.md").read_text("utf-8")):
            assert [found for found in shown.splitlines() if "free text" in found] == lines


def test_an_evaluation_folder_is_complete_even_if_no_question_was_answered(tmp_path):
    results = score_predictions([predict(error="down")])
    write_results(tmp_path, results, {})
    text = terminal_table(results)
    assert text.splitlines()[1].split()[:3] == ["direct", "0", "1"]  # n and errors
    assert ["direct", "towns", "0", "1"] in [
        row[:4] for row in cells_of((tmp_path / "tables.md").read_text())
    ]
    assert json.loads((tmp_path / "results.json").read_text())["direct"] == {"n": 0, "errors": 1}


def test_the_table_for_the_terminal_has_at_most_80_columns():
    """It had 94 for an agent and an environment, and twice as many for several of them."""
    spent = Spending(4, 123456, 12345, 1.25)
    rows = []
    for agent in ("runs/first-seed0", "runs/second-seed0"):
        for environment in ("gpt-4o-mini", "gpt-oss-20b@http://127.0.0.1:8000/v1"):
            system = System("prompt-r1", environment, agent)
            rows += [replace(predict(n, system=system), spent=spent, turns=3, format=1.0) for n in range(200)]
    rows += [predict(n, system=System("direct", environment)) for n in range(200)]
    lines = terminal_table(score_predictions(rows)).splitlines()
    table, below = lines[:6], lines[6:]
    assert max(map(len, table)) <= 80
    assert {"method", "n", "EM", "SM", "F1", "calls", "$"} <= set(table[0].split())
    assert table[-1].startswith("direct ") and table[1].startswith("prompt-r1 [1]")
    assert below[0] == "[1] prompt-r1 (gpt-4o-mini, runs/first-seed0)" and len(below) == 4
