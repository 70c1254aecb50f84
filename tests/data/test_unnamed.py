"""Datasets are inferred in files that name none, as the published training and validation files."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from prompt_r1.data.__main__ import main
from prompt_r1.data.fields import DAPO_CLOSING, DAPO_OPENING, kind_of
from prompt_r1.data.files import load_questions, write_questions
from prompt_r1.data.mixture import PAPER_DATASETS
from prompt_r1.data.named import sample_questions
from prompt_r1.data.unnamed import MOST_BLOCKS, TITLE, UNNAMED, _name_of_block, with_inferred_datasets
from prompt_r1.types import Question
from tests.paths import PUBLISHED

NO_NAME = "hotpotqa/hotpot_qa"  # in every row of the published training and validation files

EXAMPLES = [
    ("DAPO-Math", f"{DAPO_OPENING}Compute $x${DAPO_CLOSING}", "3"),
    ("DAPO-Math", r"Let $f(x) = \sqrt{x}$. Find $f(4)$", "2"),
    ("GSM8K", "Anna buys 3 pens for $5 each and 2 books for $7 each. What does she pay?", "29"),
    ("PopQA", "Who was the director of The Oath?", "Laura Poitras"),
    ("WritingPrompts", f"{TITLE}'A genie lives in a lamp .'", "Once upon a time …"),
    ("BookSum", f"{TITLE}The Watchful Guardian.", "In a quiet room …"),
    ("XSum", "Please write an article: An actor has died.", "The actor …"),
    (UNNAMED, "Who is older, Anna or Bob?", "Anna"),
    (UNNAMED, "In which year was Anna born?", "1985"),
]


@pytest.mark.parametrize(("dataset", "text", "gold"), EXAMPLES)
def test_a_question_that_shows_its_dataset_gets_its_name_and_kind(dataset: str, text: str, gold: str) -> None:
    [question] = with_inferred_datasets([Question("1", UNNAMED, text, (gold,))])
    assert (question.dataset, question.kind) == (dataset, kind_of(dataset))


def published_questions(names: tuple[str, ...] = PAPER_DATASETS) -> list[Question]:
    """The published test questions of these datasets, sorted by dataset."""
    if not PUBLISHED.exists():
        pytest.skip("the published test files are absent")
    by_name = {}
    for path in PUBLISHED.glob("*.parquet"):
        questions = load_questions(path)
        by_name[questions[0].dataset] = questions
    return [question for name in names for question in by_name[name]]


def write_unnamed(path: Path, questions: list[Question]) -> Path:
    """Write a parquet file with published columns, in which no row names its dataset."""
    write_questions(path, [replace(question, dataset=NO_NAME) for question in questions])
    return path


@pytest.mark.parametrize("seed", [0, 1])
def test_all_datasets_of_a_sorted_file_are_inferred(tmp_path: Path, seed: int) -> None:
    """The published files are sorted by dataset, and name none: all questions counted as kind qa, also the
    512 long texts among the 2,048 of validation, which were scored by EM."""
    names = random.Random(seed).sample(PAPER_DATASETS, len(PAPER_DATASETS))
    questions = published_questions(tuple(names))
    loaded = load_questions(write_unnamed(tmp_path / "train.parquet", questions))
    wanted = [(question.dataset, question.kind) for question in questions]
    assert [(question.dataset, question.kind) for question in loaded] == wanted


def test_almost_all_kinds_of_a_shuffled_file_are_inferred(tmp_path: Path) -> None:
    questions = published_questions()
    random.Random(0).shuffle(questions)
    loaded = load_questions(write_unnamed(tmp_path / "train.parquet", questions))
    pairs = list(zip(questions, loaded, strict=True))
    assert sum(question.kind != found.kind for question, found in pairs) <= 4
    assert all(question.kind == found.kind for question, found in pairs if question.kind == "text")
    named = [(question.dataset, found.dataset) for question, found in pairs if found.dataset != UNNAMED]
    assert sum(wanted != found for wanted, found in named) <= 5
    assert Counter(found for _, found in named)["BookSum"] == 128


def test_a_limited_validation_set_has_equally_many_questions_of_each_dataset(tmp_path: Path) -> None:
    """The first 256 questions of the published validation file are all from DAPO-Math."""
    path = write_unnamed(tmp_path / "validation.parquet", published_questions())
    sample = sample_questions([str(path)], "validation", 0, 256)
    assert Counter(question.dataset for question in sample) == dict.fromkeys(PAPER_DATASETS, 32)


def test_the_mix_sees_the_datasets_of_an_unnamed_file(tmp_path: Path, capsys) -> None:
    path = write_unnamed(tmp_path / "train.parquet", published_questions())
    main(["mix", "--in", str(path), "--out", str(tmp_path / "mix.jsonl"), "--per-dataset", "10"])
    assert "80 questions" in capsys.readouterr().out


def test_json_lines_with_the_name_of_all_published_rows_are_inferred_too(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"question": "Please write an article: Rain.", "answer": "x", "data_source": "hotpotqa/hotpot_qa"}\n'
        '{"question": "Please write an article: Sun.", "answer": "x", "dataset": "own"}\n'
    )
    assert [(one.dataset, one.kind) for one in load_questions(path)] == [("XSum", "text"), ("own", "qa")]


def block(size: int, marked: int, mark: Question, others: Question) -> list[Question]:
    """Questions of which the first `marked` are like `mark`."""
    return [replace(mark if number < marked else others, id=str(number)) for number in range(size)]


PLAIN = Question("", UNNAMED, "Who wrote it?", ("Anna",))
LIKE_POPQA = Question("", UNNAMED, "What genre is X?", ("jazz",))
LIKE_2WIKI = Question("", UNNAMED, "Which film came first?", ("X",))
TWO_GOLDS = Question("", UNNAMED, "Who wrote it?", ("Anna", "A."))
SUM = Question("", UNNAMED, "2 and 3 more?", ("5",))
FORMULA = Question("", UNNAMED, "Find $x$", ("5",))
NUMBERED = Question("", UNNAMED, "In which year?", ("5",))


@pytest.mark.parametrize(
    ("questions", "name"),
    [
        (block(40, 39, LIKE_POPQA, PLAIN), "PopQA"),
        (block(40, 38, LIKE_POPQA, PLAIN), UNNAMED),
        (block(40, 20, LIKE_2WIKI, PLAIN), "HotpotQA"),
        (block(40, 21, LIKE_2WIKI, PLAIN), "2WikiMultihopQA"),
        (block(40, 4, TWO_GOLDS, PLAIN), "HotpotQA"),
        (block(40, 5, TWO_GOLDS, PLAIN), "MuSiQue"),
        (block(40, 4, LIKE_POPQA, PLAIN), "HotpotQA"),
        (block(40, 5, LIKE_POPQA, PLAIN), UNNAMED),
        (block(40, 20, SUM, FORMULA), "GSM8K"),
        (block(40, 19, SUM, FORMULA), "DAPO-Math"),
        (block(40, 40, NUMBERED, PLAIN), "GSM8K"),
        (block(40, 39, NUMBERED, PLAIN), "HotpotQA"),
    ],
)
def test_the_share_of_a_block_that_decides_its_dataset(questions: list[Question], name: str) -> None:
    """95 % of one form, 90 % of none, a tenth with several golds, half of 2WikiMultihopQA's openings."""
    assert _name_of_block(questions) == name


def test_blocks_are_of_at_least_twelve_questions_and_at_most_twelve_datasets() -> None:
    sorted_file = block(12, 12, LIKE_POPQA, PLAIN) + block(12, 12, SUM, PLAIN)
    assert [one.dataset for one in with_inferred_datasets(sorted_file)] == ["PopQA"] * 12 + ["GSM8K"] * 12
    assert with_inferred_datasets(block(24, 12, LIKE_2WIKI, PLAIN))[0].dataset == "2WikiMultihopQA"
    short = block(11, 11, LIKE_2WIKI, PLAIN) + block(11, 0, PLAIN, PLAIN)
    assert {one.dataset for one in with_inferred_datasets(short)} == {UNNAMED}
    odd = [*block(24, 12, LIKE_2WIKI, PLAIN), PLAIN]
    assert {one.dataset for one in with_inferred_datasets(odd)} == {UNNAMED}
    assert MOST_BLOCKS == 12


@pytest.mark.parametrize(
    ("text", "gold", "name"),
    [
        ("Tom has 3 pens and 4 books.", "-1,234.5", "GSM8K"),
        ("Tom has three pens and twice as many books.", "9", "GSM8K"),
        ("Tom has 3 pens.", "9", UNNAMED),
        ("Tom has 3 pens and 4 books.", "9 or 10", UNNAMED),
        ("Please find the sum of 3 and 4.", "7", "DAPO-Math"),
    ],
)
def test_a_problem_with_two_quantities_and_a_number_is_arithmetic(text: str, gold: str, name: str) -> None:
    [found] = with_inferred_datasets([Question("1", UNNAMED, text, (gold,))])
    assert found.dataset == name
    [several] = with_inferred_datasets([Question("1", UNNAMED, text, (gold, "other"))])
    assert several.dataset == UNNAMED
