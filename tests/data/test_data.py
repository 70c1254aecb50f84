"""Question files are read as documented, bad rows are named, and steps take questions in a fixed order."""

import datetime
import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from prompt_r1.data.__main__ import main as data_main
from prompt_r1.data.files import load_questions, write_questions
from prompt_r1.data.questions import sample_questions, training_and_validation
from prompt_r1.data.sampler import digest_of, questions_of_step, stratified
from prompt_r1.errors import UsageError
from prompt_r1.miniworld import mini_world
from prompt_r1.protocol import PAPER_INSTRUCTION
from prompt_r1.types import Question
from tests.support.paths import PUBLISHED


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "cities.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def sha1(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


# --- JSON lines -----------------------------------------------------------------------------------


def test_a_json_line_becomes_a_question(tmp_path: Path) -> None:
    full = {"id": "q1", "question": "Where?", "answers": ["Paris", "P."], "dataset": "towns", "kind": "math"}
    minimal = {"question": "Why?", "answer": "Because"}
    others = {"id": 7, "question": "Why not?", "golden_answers": [42, -1.5], "data_source": "gsm8k-256-test"}
    assert load_questions(jsonl(tmp_path, full, minimal, others)) == [
        Question("q1", "towns", "Where?", ("Paris", "P."), "math"),
        Question(sha1("Why?"), "cities", "Why?", ("Because",), "qa"),
        Question("7", "GSM8K", "Why not?", ("42", "-1.5"), "math"),
    ]


def test_other_fields_of_a_row_are_extra(tmp_path: Path) -> None:
    row = {"question": "Why?", "answer": "Because"}
    [plain] = load_questions(jsonl(tmp_path, row))
    [found] = load_questions(jsonl(tmp_path, row | {"level": 3, "hints": ["a"]}))
    assert (plain.extra, found.extra) == ({}, {"level": 3, "hints": ["a"]})
    assert digest_of([plain]) != digest_of([found])  # a reward may depend on them


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_other_fields_survive_writing_converting_and_mixing(tmp_path: Path, suffix: str) -> None:
    """They were lost, and a reward that reads them then raised in the first step."""
    rows = [{"question": f"{number}?", "answer": "a", "level": number, "é": [None]} for number in range(4)]
    own, table, mixed = (tmp_path / f"{name}.{suffix}" for name in ("own", "table", "mixed"))
    write_questions(own, load_questions(jsonl(tmp_path, *rows)))
    data_main(["convert", "--from", "questions", "--in", str(own), "--out", str(table)])
    data_main(["mix", "--in", str(table), "--out", str(mixed), "--per-dataset", "4"])
    found = {question.text: question.extra for question in load_questions(mixed)}
    assert found == {row["question"]: {"level": row["level"], "é": [None]} for row in rows}


def test_other_columns_of_a_parquet_table_are_extra_and_bounded(tmp_path: Path) -> None:
    row = {"question": "Why?", "answer": "Because", "day": datetime.date(1, 2, 3), "level": 3}
    [question] = load_questions(parquet(tmp_path, row))
    assert question.extra == {"day": datetime.date(1, 2, 3), "level": 3} and digest_of([question])
    write_questions(tmp_path / "own.jsonl", [question])
    assert load_questions(tmp_path / "own.jsonl")[0].extra == {"day": "0001-02-03", "level": 3}
    with pytest.raises(UsageError, match="the field book has 1,000,001 characters, more than 1,000,000"):
        load_questions(parquet(tmp_path, row | {"book": "x" * 1_000_001}))


def test_the_kind_of_a_question_follows_from_the_name_of_its_dataset(tmp_path: Path) -> None:
    names = {
        "math": ("gsm8k", "DAPO-Math", "math_qa"),
        "text": ("BookSum", "WritingPrompts", "xsum"),
        "qa": ("hotpotqa", "anything"),
    }
    for kind, datasets in names.items():
        rows = [{"question": "Q?", "answer": "A", "dataset": dataset} for dataset in datasets]
        found = [(question.dataset, question.kind) for question in load_questions(jsonl(tmp_path, *rows))]
        assert found == [(dataset, kind) for dataset in datasets]


def test_a_byte_order_mark_crlf_blank_lines_and_unicode_line_separators_are_accepted(tmp_path: Path) -> None:
    row = json.dumps({"question": "One\u2028line?\x85", "answer": "ja"}, ensure_ascii=False).encode()
    [question] = load_questions(jsonl(tmp_path, b"\xef\xbb\xbf" + row + b"\r", b"\r", b""))
    assert question.text == "One\u2028line?\x85"


GOOD = {"id": "1", "question": "Where?", "answers": ["Paris"]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answers": ["x"]}, "question is missing"),
        ({"question": None, "answers": ["x"]}, "question must be a text, not null"),
        ({"question": " \n", "answers": ["x"]}, "question contains an empty text"),
        ({"question": "a\ud800", "answers": ["x"]}, "lone surrogate"),
        ({"question": "Q?"}, "answers is missing"),
        ({"question": "Q?", "answers": []}, "answers has no gold answer"),
        ({"question": "Q?", "answers": ["x", ""]}, "answers contains an empty text"),
        ({"question": "Q?", "answers": [None]}, "not null"),
        ({"question": "Q?", "answers": [["x"]]}, "not list"),
        ({"question": "Q?", "answers": [True]}, "not bool"),
        (b'{"question": "Q?", "answers": [NaN]}', "not float"),
        ({**GOOD, "question": "Q?"}, "row 1 already has the id '1'"),
        ({**GOOD, "id": None}, "id must contain texts or numbers, not null"),
        ({**GOOD, "id": "2", "kind": "poem"}, "kind is 'poem'; choose one of qa, math, text"),
        ({**GOOD, "id": "2", "dataset": None}, "dataset must be a text, not null"),
        (["Q?", "x"], "expected a JSON object, not list"),
        (b'{"question": "Q', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"question": "\xff"}', r"not UTF-8 \(byte 15 of the line\)"),
        (b'{"question": "Q?", "answers": [' + b"9" * 5000 + b"]}", "not JSON"),
    ],
)
def test_the_error_for_a_bad_row_names_file_row_and_reason(tmp_path: Path, row: object, reason: str) -> None:
    path = jsonl(tmp_path, GOOD, row)
    with pytest.raises(UsageError, match=rf"cities\.jsonl, row 2: .*{reason}"):
        load_questions(path)


def test_a_repeated_question_without_an_id_gets_its_row_number_appended(tmp_path: Path) -> None:
    row = {"question": "Where?", "answer": "Here"}
    questions = load_questions(jsonl(tmp_path, row, b"", row))
    assert [question.id for question in questions] == [sha1("Where?"), f"{sha1('Where?')}-3"]


def test_a_gold_answer_of_4000_digits_loads(tmp_path: Path) -> None:
    """It ended with "internal error": it is larger than any float."""
    [question] = load_questions(jsonl(tmp_path, b'{"question": "Q?", "answer": ' + b"9" * 4000 + b"}"))
    assert question.answers == ("9" * 4000,)


def test_files_that_cannot_be_read_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "rows.parquet").write_bytes(b"no parquet")
    (tmp_path / "rows.csv").write_text("question,answer")
    (tmp_path / "folder.jsonl").mkdir()
    for name in (*(path.name for path in tmp_path.iterdir()), "missing.jsonl"):
        with pytest.raises(UsageError, match=name):
            load_questions(tmp_path / name)


# --- Published parquet ----------------------------------------------------------------------------


def published_row(
    question: str, answers: list[str] | None, source: str = "PopQA-256-test"
) -> dict[str, object]:
    return {
        "data_source": source,
        "prompt": [{"content": f"Question: {question}\n{PAPER_INSTRUCTION}", "role": "user"}],
        "ability": "multihop_qa",
        "reward_model": {"ground_truth": answers, "style": "rule"},
    }


def parquet(folder: Path, *rows: dict[str, object]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "published.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_a_published_row_becomes_a_question(tmp_path: Path) -> None:
    tricky = "What begins with\nFirst, provide a simple explanation of the question"
    path = parquet(
        tmp_path,
        published_row("Where?", ["Paris", "$"]),
        published_row("Where?", ["Rome"]),
        published_row(tricky, ["a"], "w-book-6600-256-test"),
        published_row("How many?", ["3"], "hotpotqa/hotpot_qa"),
    )
    assert load_questions(path) == [
        Question(sha1("Where?"), "PopQA", "Where?", ("Paris", "$"), "qa"),
        Question(sha1("Where?") + "-2", "PopQA", "Where?", ("Rome",), "qa"),
        Question(sha1(tricky), "BookSum", tricky, ("a",), "text"),
        Question(sha1("How many?"), "mixed", "How many?", ("3",), "qa"),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (published_row("", ["x"]), "question contains an empty text"),
        (published_row("Q?", []), "ground_truth has no gold"),
        (published_row("Q?", None), "ground_truth must contain texts"),
        (published_row("Q?", [" "]), "ground_truth contains an empty text"),
        ({**published_row("Q?", ["x"]), "prompt": None}, "prompt must contain one message"),
        ({**published_row("Q?", ["x"]), "prompt": [{"content": "Q?", "role": "user"}]}, "the prompt must be"),
        ({**published_row("Q?", ["x"]), "prompt": [{"content": None, "role": "user"}]}, "content must be"),
        ({**published_row("Q?", ["x"]), "reward_model": None}, "reward_model must contain ground_truth"),
        ({**published_row("Q?", ["x"]), "data_source": None}, "data_source must be a text"),
    ],
)
def test_the_error_for_a_bad_published_row_names_file_row_and_reason(
    tmp_path: Path, row: dict[str, object], reason: str
) -> None:
    path = parquet(tmp_path, published_row("Where?", ["Paris"]), row)
    with pytest.raises(UsageError, match=rf"published\.parquet, row 2: .*{reason}"):
        load_questions(path)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published test files are absent")
def test_all_published_test_files_load() -> None:
    kinds: dict[str, set[str]] = {}
    for path in sorted(PUBLISHED.glob("*.parquet")):
        questions = load_questions(path)
        assert len(questions) == len({question.id for question in questions}) == 128
        assert not any("First, provide a simple" in question.text for question in questions)
        for question in questions:
            kinds.setdefault(question.kind, set()).add(question.dataset)
    assert kinds == {
        "qa": {"2WikiMultihopQA", "HotpotQA", "MuSiQue", "PopQA", "SQuAD v2", "TriviaQA"},
        "math": {"GSM8K", "DAPO-Math", "MathQA"},
        "text": {"BookSum", "WritingPrompts", "XSum"},
    }


# --- Sampling -------------------------------------------------------------------------------------


QUESTIONS = [Question(str(number), "d", f"Question {number}?", ("x",)) for number in range(10)]


def ids(questions: list[Question]) -> list[str]:
    return [question.id for question in questions]


def taken(*, steps: int, count: int, seed: int) -> list[Question]:
    """The questions of the first steps."""
    numbers = range(1, steps + 1)
    return [q for step in numbers for q in questions_of_step(QUESTIONS, step, count=count, seed=seed)]


def test_each_epoch_has_every_question_once_in_a_new_order() -> None:
    order = ids(questions_of_step(QUESTIONS, 1, count=30, seed=0))
    epochs = [order[:10], order[10:20], order[20:]]
    assert all(sorted(epoch) == sorted(ids(QUESTIONS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("count", [1, 3, 5, 10, 30])
def test_the_order_depends_on_the_seed_and_not_on_how_many_a_step_takes(count: int) -> None:
    """So a resumed run continues as if it had never stopped."""
    at_once = questions_of_step(QUESTIONS, 1, count=30, seed=3)
    assert taken(steps=30 // count, count=count, seed=3) == at_once != taken(steps=30, count=1, seed=4)


def test_the_digest_depends_on_the_questions_their_answers_and_their_order() -> None:
    answered = [replace(QUESTIONS[0], answers=("y",)), *QUESTIONS[1:]]
    same = digest_of(list(QUESTIONS))
    assert digest_of(QUESTIONS) == same
    assert same not in {digest_of(questions) for questions in (answered, QUESTIONS[::-1], QUESTIONS[:9])}


def test_every_beginning_of_the_stratified_order_has_each_datasets_share() -> None:
    sizes = {"a": 60, "b": 30, "c": 10}
    questions = [
        Question(f"{name}{n}", name, "?", ("x",)) for name, size in sizes.items() for n in range(size)
    ]
    order = stratified(questions)
    assert sorted(ids(order)) == sorted(ids(questions))
    for limit in range(101):
        for name, size in sizes.items():
            share = sum(question.dataset == name for question in order[:limit])
            assert abs(share - limit * size / 100) <= 1.01, (limit, name)
    chosen = [question.id for question in order if question.dataset == "a"]
    assert chosen[:20] != [f"a{n}" for n in range(20)]  # a random sample, not the first ones


def test_a_sample_of_the_mini_world_is_its_first_questions() -> None:
    assert sample_questions(["mini"], "validation", 0, 100) == mini_world(0).validation[:100]


@pytest.mark.parametrize("name", ["own.jsonl", "own.parquet"])
def test_a_symbolic_link_in_place_of_the_partial_file_is_not_followed(tmp_path, name):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / f".{name}.partial").symlink_to(target)
    write_questions(tmp_path / name, [Question("1", "own", "Wer ist Ägidius?", ("Anna",))])
    assert target.read_text() == "precious"
    assert [question.text for question in load_questions(tmp_path / name)] == ["Wer ist Ägidius?"]


def test_a_tenth_is_held_out_by_dataset_and_no_text_of_it_is_trained_on(tmp_path):
    rows = [{"question": f"{n % 45}?", "answer": "a", "dataset": "AB"[n % 3 == 0]} for n in range(60)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [str(tmp_path / "own.jsonl")]
    training, validation = training_and_validation(files, ["held-out"], seed=0, limit=100)
    assert Counter(question.dataset for question in validation) == {"A": 4, "B": 2}
    held_out = {question.text for question in validation}
    assert held_out.isdisjoint(question.text for question in training)
    assert {question.text for question in training} | held_out == {row["question"] for row in rows}
    assert training_and_validation(files, ["held-out"], seed=1, limit=2)[1] == validation[:2]
    (tmp_path / "own.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(UsageError, match="no question to train on"):
        training_and_validation(files, ["held-out"], seed=0, limit=9)
