"""Means, intervals, answers that are read in sentences, and the paper's tables, against independent ones."""

import json
import random
import re
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import pytest

from prompt_r1.data.datasets import OUT_OF_DISTRIBUTION, TRAINED
from prompt_r1.data.files import kind_of
from prompt_r1.evaluation import paper_numbers
from prompt_r1.evaluation.extraction import extract_answer
from prompt_r1.evaluation.paper_numbers import MINI, REPORTED_METRICS
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.evaluation.results_folder import means_of, write_results
from prompt_r1.evaluation.scores import score_predictions, text_metrics
from prompt_r1.evaluation.statistics import macro_interval, wilson
from prompt_r1.evaluation.tables import paper_tables
from prompt_r1.types import Question
from tests.evaluation.predictions import DIRECT, predict, predict_all, question_of
from tests.support.paths import SHARED

PAPER_TEXT = SHARED / "paper" / "paper_full_text.txt"
DATASETS = (*TRAINED, *OUT_OF_DISTRIBUTION)
COT = System("cot", "large")


@pytest.mark.skipif(not PAPER_TEXT.exists(), reason="the paper's text is not here")
def test_every_number_occurs_in_the_text_of_the_paper():
    rows = []
    for line in PAPER_TEXT.read_text("utf-8").splitlines():
        if line.startswith("| "):
            rows.append(tuple(map(float, re.findall(r"(?<![(+.\d])\d+\.\d\d\b", line))))
    numbers = paper_numbers.NUMBERS
    columns = list(dict.fromkeys(key[:3] for key in numbers))
    for where in dict.fromkeys(key[3:] for key in numbers):
        assert tuple(numbers[*column, *where] for column in columns[:10]) in rows
    for method in ("agent-only", "untrained"):  # Table 4
        for datasets in (DATASETS[:6], DATASETS[6:]):
            where = [(name, metric) for name in datasets for metric in REPORTED_METRICS[kind_of(name)]]
            assert tuple(numbers[method, MINI, MINI, *row] for row in where) in rows
    for column in columns[12:]:  # Table 5
        names = OUT_OF_DISTRIBUTION
        where = [(name, metric) for name in names for metric in REPORTED_METRICS[kind_of(name)]]
        assert tuple(numbers[*column, *row] for row in where) in rows


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
    differing = score_predictions([predict(1), predict(1, "Lyon", sample=1)])
    assert differing.scores(DIRECT, "towns", "em") == [0.5]


def test_failed_calls_are_counted_and_do_not_lower_the_mean():
    results = score_predictions([predict(1), predict(2, "Lyon"), predict(3, None, error="HTTP 500")])
    rate = results.average(DIRECT, ["towns"], "em")
    assert (rate.mean, rate.n, rate.errors) == (0.5, 2, 1)
    means = means_of(results, DIRECT, ["towns"])
    assert (means["n"], means["errors"], means["em"]) == (2, 1, 0.5)


def test_a_table_shows_failed_calls():
    """A mean over fewer questions than its neighbour's is marked with its n and the number of errors."""
    complete = [predict(number, system=COT) for number in range(4)]
    incomplete = [predict(number, error="HTTP 500" if number == 3 else "") for number in range(4)]
    [table] = paper_tables(score_predictions([*incomplete, *complete]), {})
    header, _, row = cells_of(table)[:3]
    assert header[2:] == ["direct", "cot"]
    assert row[2].endswith("] (n 3, 1 errors)") and row[3].endswith("]")


def test_an_average_weights_datasets_equally_and_a_pooled_mean_weights_questions_equally():
    """Two of eight towns and four of four rivers: 5/8 over datasets, 6/12 over questions."""
    rows = predict_all({"towns": [True] * 2 + [False] * 6, "rivers": [True] * 4, "XSum": [True] * 5})
    half = predict(answer="Paris Lyon", question=question_of(5, dataset="XSum", kind="text"))  # F1 is 2/3
    results = score_predictions([*rows, half])
    average = results.average(DIRECT, ["towns", "rivers", "XSum"], "em")  # texts do not report EM
    pooled = means_of(results, DIRECT, ["towns", "rivers"])
    assert (average.mean, average.n, pooled["em"], pooled["n"]) == (0.625, 12, 0.5, 12)
    assert (pooled["em_low"], pooled["em_high"]) == wilson(6, 12)
    questions = {"towns": [1] * 2 + [0] * 6, "rivers": [1] * 4}
    assert (average.low, average.high) == macro_interval(questions)


def test_an_average_over_a_dataset_that_was_not_measured_is_none():
    rows = [*predict_all({"towns": [True], "rivers": [True]}), *predict_all({"towns": [True]}, COT)]
    results = score_predictions(rows)
    assert results.average(COT, ["towns", "rivers"], "em") is None
    assert results.average(DIRECT, ["towns", "rivers"], "em").mean == 1


def test_ssim_is_measured_for_texts_and_the_table_says_when_it_was_not(tmp_path):
    rows = predict_all({"XSum": [True, False], "PopQA": [True, False]})

    def similarity(predictions, answers, *, official):
        assert list(predictions) == ["Paris", "Lyon"] and len(answers) == 2 and not official
        return [0.9, 0.5]

    encoder = SimpleNamespace(similarity=similarity)
    with_ssim, without = score_predictions(rows, encoder=encoder), score_predictions(rows)
    assert with_ssim.average(DIRECT, ["XSum"], "ssim").mean == pytest.approx(0.7)
    assert with_ssim.average(DIRECT, ["PopQA"], "ssim") is None
    assert without.average(DIRECT, ["XSum"], "ssim") is None
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
    names = [name for name in TRAINED if kind_of(name) != "text"]
    assert average[2].startswith(f"{100 * mean(sum(drawn(0, 0.4)[name]) / 16 for name in names):.1f} [")
    assert ["", "EM, paper", "34.89", "44.01"] in [line[:4] for line in wide]

    [transfer] = [cells for title, cells in tables.items() if title.startswith("Table 5: transfer")]
    assert any("(runs/a was trained with gpt-4o-mini, runs/b was trained with" in title for title in tables)
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
    """They come from files of others, and are shown by terminals and editors."""
    full = System("prompt-r1", "large", f"runs/{HOSTILE}")
    rows = [*predict_all({HOSTILE: [True] * 8, "b": [True]}, full)]
    rows += predict_all({HOSTILE: [False] * 8}, System("prompt-r1", "large", "runs/z"))
    rows += predict_all({HOSTILE: [False] * 8, "b": [False]})
    text = write_results(tmp_path, score_predictions(rows), {})
    written = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert written.keys() == {"tables.md", "results.json"}
    for name, content in [("printed", text), *written.items()]:
        hidden = {letter for letter in content if not letter.isprintable() and letter != "\n"}
        assert not hidden, f"{name}: {hidden}"
    lines = [line for line in written["tables.md"].splitlines() if line.startswith("|")]
    assert lines and all(line.endswith("|") for line in lines)


def test_the_answer_that_is_read_stands_beside_the_official_score(tmp_path):
    whole = "The town is Paris."
    rows = [predict(number, whole, question=question_of(number, text="Which town?")) for number in range(8)]
    text = write_results(tmp_path, score_predictions(rows), {})
    tables = (tmp_path / "tables.md").read_text("utf-8")
    direct = next(row for row in cells_of(tables) if row[0] == "direct")
    assert direct[4].startswith("0.000 [") and direct[5].startswith("1.000 [") and "EM read" in text
    assert "rule for all methods" in tables


def test_an_evaluation_folder_is_complete_even_if_no_question_was_answered(tmp_path):
    text = write_results(tmp_path, score_predictions([predict(error="down")]), {})
    assert text.splitlines()[1].split()[:3] == ["direct", "0", "1"]  # n and errors
    assert ["direct", "towns", "0", "1"] in [
        row[:4] for row in cells_of((tmp_path / "tables.md").read_text())
    ]
    assert json.loads((tmp_path / "results.json").read_text())["direct"] == {"n": 0, "errors": 1}


CAPITAL = "What is the capital of Japan?"


@pytest.mark.parametrize(
    ("answer", "question", "read"),
    [
        ("The capital of Japan is Tokyo.", CAPITAL, "Tokyo"),
        ("Tokyo is the capital of Japan.", CAPITAL, "Tokyo"),
        ("I think it is Tokyo. I hope this helps.", CAPITAL, "Tokyo"),
        ("Good question! That would be Tokyo, I think.", CAPITAL, "Tokyo"),
        ("The answer is: Tokyo.", CAPITAL, "Tokyo"),
        (r"So it is \boxed{Tokyo}.", CAPITAL, "Tokyo"),
        ("Tokyo", CAPITAL, "Tokyo"),
        ("", CAPITAL, ""),
        ("Bo Li directed Mu.", "Who directed Mu?", "Bo Li"),
        ("Mu was directed by J. R. R. Li.", "Who directed Mu?", "J. R. R. Li"),
        ("Mu was released in 1999.", "When was Mu released?", "1999"),
        ("Yes, Mu was released before Nu.", "Was Mu released before Nu?", "Yes"),
        ("Mu was released first.", "Which was released first, Mu or Nu?", "Mu"),
    ],
)
def test_the_short_answer_is_read_without_a_look_at_the_gold_answer(answer, question, read):
    assert extract_answer(answer, question, "qa") == read


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("She has 42 apples left.", "42"),
        ("3 + 4 = $7", "$7"),
        ("none", "none"),
        ("It is −5.", "-5"),
        ("It is .5", ".5"),
        ("From 3-5", "5"),
        ("It is 2 1/2 cups.", "2 1/2"),
        ("It is 25 cm^2.", "25"),
        ("It is 10^5.", "10^5"),
        (r"The answer is $\frac{1}{2}$.", r"$\frac{1}{2}$"),
        (r"So it is \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"So it is \boxed{5 \text{ apples}}, not 6.", "5"),
    ],
)
def test_of_a_mathematical_answer_the_last_number_is_read(answer, read):
    """The minus, the point, or half of a fraction was lost, and another gold answer was right."""
    assert extract_answer(answer, "How many apples does she have?", "math") == read


@pytest.mark.parametrize(
    ("question", "gold", "answer", "official", "read"),
    [
        # A gain over this environment was partly an artefact.
        (CAPITAL, "Tokyo", "The capital of Japan is Tokyo.", 0, 1),
        (CAPITAL, "Tokyo", "Tokyo", 1, 1),
        (CAPITAL, "Tokyo", "The capital of Japan is Kyoto.", 0, 0),
        (CAPITAL, "Tokyo", "Tokyo is not the capital of Japan, Kyoto is.", 0, 0),
        ("Which show is it?", "This Is Us", "This Is Us", 1, 1),  # what is right as it stands stays right
    ],
)
def test_the_rate_stands_beside_the_official_one_for_every_method(question, gold, answer, official, read):
    metrics = text_metrics(Prediction(Question("q", "towns", question, (gold,)), answer))
    assert (metrics["em"], metrics["em_read"]) == (official, read)
