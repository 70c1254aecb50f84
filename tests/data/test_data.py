"""Question files are read as documented, bad rows are named, and steps take questions in a fixed order."""

import csv
import datetime
import gzip
import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prompt_r1.data.__main__ import main as data_main
from prompt_r1.data.datasets import write_questions
from prompt_r1.data.files import DAPO_OPENING, load_questions
from prompt_r1.data.questions import find_questions, sample_questions, training_and_validation
from prompt_r1.data.sampler import digest_of, stratified
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.world import mini_questions
from prompt_r1.types import Question
from tests.support.paths import PUBLISHED
from tests.support.published import parquet, published_row


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "cities.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def sha1(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def test_a_json_line_becomes_a_question(tmp_path: Path) -> None:
    full = {"id": "q1", "question": "Where?", "answers": ["Paris", "P."], "dataset": "towns", "kind": "math"}
    full |= {"answer": "P."}  # one of the answers
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


def test_other_fields_survive_writing_and_mixing(tmp_path: Path) -> None:
    """They were lost, and a reward that reads them then raised in the first step."""
    rows = [{"question": f"{n}?", "answer": "a", "level": n, "é": [None, "\ud83d"]} for n in range(4)]
    own, mixed = tmp_path / "own.jsonl", tmp_path / "mixed.jsonl"
    write_questions(own, load_questions(jsonl(tmp_path, *rows)))
    data_main(["mix", "--in", str(own), "--out", str(mixed), "--per-dataset", "4"])
    found = {question.text: question.extra for question in load_questions(mixed)}
    assert found == {row["question"]: {"level": row["level"], "é": [None, "\ud83d"]} for row in rows}


def test_the_kind_of_a_question_follows_from_the_name_of_its_dataset(tmp_path: Path) -> None:
    """A name that only contains a dataset's, as tax_summary contains xsum, was scored as that dataset."""
    names = {
        "math": ("gsm8k", "DAPO-Math", "math_qa"),
        "text": ("BookSum", "WritingPrompts", "xsum"),
        "qa": ("hotpotqa", "anything", "tax_summary", "not_gsm8k"),
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
        ({"answers": ["x"]}, r"question is missing \(there are: 'answers'\): name the columns question and"),
        ({"question": None, "answers": ["x"]}, "question must be a text, not null"),
        ({"question": " \n", "answers": ["x"]}, "question contains an empty text"),
        ({"question": "Q?", "answers": ["\u200b"]}, "answers contains an empty text"),
        ({"question": "a\ud800", "answers": ["x"]}, "lone surrogate"),
        ({"question": "Q?"}, "answers is missing"),
        ({"question": "Q?", "answers": []}, "answers has no gold answer"),
        ({"question": "Q?", "answer": "a", "answers": ["b"]}, "the fields answers and answer differ"),
        (
            b'{"question": "Q?", "answer": "a", "answer": "b"}',
            "two fields have one name: question, answer, answer",
        ),
        ({"question": "Q?", "answers": [["x"]]}, "not list"),
        (b'{"question": "Q?", "answers": [NaN]}', "not float"),
        ({**GOOD, "question": "Q?"}, "another row has the id '1' too"),
        ({**GOOD, "id": None}, "id must contain texts or numbers, not null"),
        ({**GOOD, "id": "2", "kind": "poem"}, "kind is 'poem'; choose one of qa, math, text"),
        ({**GOOD, "id": "2", "dataset": None}, "dataset must be a text, not null"),
        ({**GOOD, "id": "2", "answers": [2], "choices": ["1", "2"]}, "2 stands for .*write the text"),
        ({"question": "Q?", "answer": "B", "options": ["Rome", "Paris"]}, r"'B' stands for a .*options\)"),
        ({"question": "Q?", "answer": "B", "options": {"A": "Rome", "B": "Paris"}}, "'B' stands for"),
        ({"question": "Q?", "answer": "A", "choices": {"text": ["x"], "label": ["A"]}}, "'A' stands for"),
        ({"question": "Q?", "answer": "A", "choices": [{"text": "x", "label": "A"}]}, "'A' stands for"),
        ({"question": "Q?", "answer": "A", "options": "A) Rome B) Paris"}, "'A' stands for"),
        ({"question": "Q?", "answer": "0", "choices": "['Rome' 'Paris']"}, "'0' stands for"),
        ({"question": "Q?", "answer": "A", "A": "Rome", "B": "Paris"}, r"'A' stands for .*field A\)"),
        ({"question": "Q?", "answer": "b", "option_a": "x", "option_b": "y"}, r"'b' .*field option_b\)"),
        ({"question": "Q?", "answer": "x", " kind": "math"}, "' kind' differs from 'kind'"),
        ({"question": "Q?", "answer": "B. Paris", "options": ["Rome", "Paris"]}, "'B. Paris' stands for"),
        ({"question": "Q?", "answer": '["A", "B"]', "options": ["Rome", "Paris"]}, "'A' stands for"),
        ({"question": "Q?", "answer": "A, B", "options": ["Rome", "Paris"]}, "'A, B' stands for"),
        ({"Question": "Q?", "Answer": "x"}, "'Question' differs from 'question' only in case or signs"),
        ({"\u200bquestion": "Q?", "answer": "x"}, "differs from 'question'"),
        ({"question": "Q?", "answer": "x", "answer.1": "y"}, "'answer.1' differs from 'answer'"),
        ({"question": "a\0", "answers": ["x"]}, "a NUL"),
        (b'{"question": "Q', "not JSON .*each row in a line of its own, or all rows as a list in a .json"),
        (b"[" * 100_000, "not JSON"),
        (b'{"question": "\xff"}', "not JSON in UTF-8 .*position 14"),
        (b'{"question": "Q?", "answers": [' + b"9" * 5000 + b"]}", "not JSON"),
    ],
)
def test_the_error_for_a_bad_row_names_file_row_and_reason(tmp_path: Path, row: object, reason: str) -> None:
    path = jsonl(tmp_path, GOOD, row)
    with pytest.raises(UsageError, match=rf"cities\.jsonl, row 2: .*{reason}"):
        load_questions(path)


def test_a_repeated_question_gets_its_row_number_appended_to_its_id_and_is_counted(tmp_path, capsys) -> None:
    row = {"question": "Where?", "answer": "Here"}
    path = jsonl(tmp_path, row, b"", row)
    questions = find_questions([str(path)], "train", 0)
    assert [question.id for question in questions] == [sha1("Where?"), f"{sha1('Where?')}-3"]
    assert "cities.jsonl: 1 of 2 questions repeat others" in capsys.readouterr().err


def test_validation_questions_that_are_trained_on_are_counted_once(tmp_path, capsys, monkeypatch) -> None:
    """They were validated on without a word, and the agent looked better than it was; then by every rank."""
    for name, texts in (("a", ("Where?", "Who?")), ("b", ("where? ", "Why?"))):
        write_questions(tmp_path / f"{name}.jsonl", [Question(text, "d", text, ("x",)) for text in texts])
    files = [str(tmp_path / "a.jsonl")], [str(tmp_path / "b.jsonl")]
    training_and_validation(*files, seed=0, limit=0)
    said = capsys.readouterr().err
    assert "1 of 2 validation questions are among the training questions" in said
    training_and_validation(["mini"], ["mini"], seed=0, limit=0)
    monkeypatch.setenv("RANK", "1")
    training_and_validation(*files, seed=0, limit=0)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS: `git lfs pull`"),
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (b"<HTML><body>", "a web page"),
        (b'<?xml version="1.0"?><Error>', "XML"),
        (gzip.compress(b"{}", mtime=0), "compressed"),
        (b"PK\x03\x04....", "a zip archive or an Excel file"),
        (b"PAR1....", "a parquet file: name it .parquet"),
        *(("question,".encode(name), "in UTF-16.*as UTF-8") for name in ("utf-16", "utf-16-le", "utf-32-be")),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused_with_what_it_is(tmp_path, content, what) -> None:
    """A pointer was "not JSON", a web page a table with too many cells."""
    for suffix in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".wp_source"):
        if not (suffix == ".parquet" and content.startswith(b"PAR1")):
            path = tmp_path / f"own{suffix}"
            path.write_bytes(content)
            with pytest.raises(UsageError, match=f"own{suffix} is .*{what}"):
                load_questions(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("own.JSONL", '{"question": "Q?", "answer": "a"}'),
        ("own.jsonl", '{"question": "Q?",\t"answer": "a"}\r\r\n'),
        ("own.json", '{\n"question": "Q?",\n"answer": "a"\n}'),
        ("own.json", '{\n"version": 1,\n"data": [{"question": "Q?", "answer": "a"}]}'),
        ("own.json", '{"questions": [{"question": "Q?", "answer": "a"}]}'),
        ("own.TSV", "question\tanswer\nQ?\ta\n"),
        ("own.csv", "\n\nquestion,answer\nQ?,a\n"),
        ("own.csv", "question,answer\rQ?,a\r"),
        ("own.csv", '"question", "answer"\n"Q?", "a"\n'),
    ],
)
def test_layouts_that_can_be_read_in_one_way_only_are_read(tmp_path, name, content) -> None:
    (tmp_path / name).write_bytes(content.encode())
    [question] = load_questions(tmp_path / name)
    assert (question.text, question.answers) == ("Q?", ("a",))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "parquet"])
def test_a_table_with_the_usual_columns_needs_no_conversion(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": 'Who, "then"?', "answer": "Anna", "kind": "math", "day": datetime.date(1, 2, 3)}]
    path = tmp_path / f"own.{suffix}"
    if suffix == "parquet":
        parquet(path, *rows)
    elif suffix == "json":
        path.write_text(json.dumps(rows, default=str))
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.writer(file, delimiter="\t" if suffix == "tsv" else ",")
            writer.writerows([rows[0].keys(), rows[0].values()])
    [question] = load_questions(path)
    assert (question.text, question.answers, question.kind) == ('Who, "then"?', ("Anna",), "math")
    assert list(question.extra) == ["day"] and digest_of([question])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("question,answer\nWhere?,Paris, France\n", r"row 1: cells: 3, columns: 2 \(.*double quotes"),
        ("question,answer,id\nWhere?,Paris\n", "row 1: cells: 2, columns: 3"),
        ("# a comment\nquestion,answer\nWhere?,Paris\n", r"row 1: .*columns: 1 \(# a comment\)"),
        ("question,answer\n# from a, to b\nWhere?,Paris\n", "row 1: a comment line"),
        ('{"question": "Q?", "answer": "a"}\n', "row 1: JSON, not a table: name the file .jsonl"),
        ('question,answer\nA?,B\nC?,"D" E\n', "row 2: not readable .*at both ends of a text, and double"),
        ('question,answer\nA?,"B\nC?,D\n', "row 1: not readable"),
        ("question,answer,answer\nA?,B,C\n", "row 1: two columns have one name"),
        ("question;answer\nA?;B\n", "row 1: the columns are separated by ';': save the table with commas"),
        ("question,answer\nA?,1945.0\n", r"holds '1945.0', .*as people do, or write \[\"1945.0\"\]"),
        ("question,answer\nA?,1.9E+05\n", "row 1: .* as programs write a number or a day"),
        ("question,answer\nA?,2020-01-02 00:00:00\n", "row 1: .* as programs write a number or a day"),
        ("question,answer\nA?,2020-01-02T00:00:00.000Z\n", "row 1: .* as programs write a number or a day"),
        ("question,answer\nA?,#N/A\n", r"row 1: .* a missing value: remove the row, or write \[\"#N/A\"\]"),
        ("question,answer\nA?,1/2/2020 0:00\n", "row 1: .* as programs write a number or a day"),
        ("question,answer\nA?,None\n", "row 1: .* a missing value"),
        ("question,answer\nnan,x\n", "row 1: .* a missing value: remove the row"),
        ("question,answer\n,x\n", "row 1: the field question contains an empty text"),
        ("question,answer\n" + "Q?,x\n" * 5000 + "Q?,caf\udce9\n", "row 5001: .*save the file as UTF-8"),
        ("question,answer\nA?,B\n\ufeffquestion,answer\nC?,D\n", "row 2: .*, or the header again"),
        ('[{"question": "Q?", "answer": "a"}]', "row 1: JSON, not a table"),
        ("question,answer\n", "there are no questions in it"),
    ],
)
def test_a_table_that_would_be_read_otherwise_than_it_was_written_is_refused(tmp_path, table, reason) -> None:
    """`Where?,Paris, France` had the gold Paris, and nothing was said."""
    (tmp_path / "own.csv").write_text(table, "utf-8", "surrogateescape")
    with pytest.raises(UsageError, match=reason):
        load_questions(tmp_path / "own.csv")


@pytest.mark.parametrize(
    ("answer", "golds", "fields"),
    [
        ('["Paris", "City of Paris"]', ("Paris", "City of Paris"), {}),
        ('["[0, 1)"]', ("[0, 1)",), {}),
        (1945.0, ("1945",), {}),
        (-0.5, ("-0.5",), {}),
        (1e-05, ("0.00001",), {}),
        (-0.0, ("0",), {}),
        (["1945.0", "a|b", "None"], ("1945.0", "a|b", "None"), {}),
        *((text, (text,), {}) for text in ("007", "1e5", "True", "NA", "2020-01-01", "12:30", "1/2", "a; b")),
        ("(0, 1)", ("(0, 1)",), {}),
        ("|x - 3| < 5", ("|x - 3| < 5",), {"kind": "math"}),
        (r"\{x | x > 3\}", (r"\{x | x > 3\}",), {"dataset": "gsm8k"}),
        ("[-2,7]", ("[-2,7]",), {"kind": "math"}),
        (2, ("2",), {"options": [1, 2]}),
        ("38", ("38",), {"options": "a ) 38 , b ) 27.675"}),
        ("A", ("A",), {"options": "a ) A , b ) B"}),
        ("Paris", ("Paris",), {"answers": []}),
        ("Paris", ("Paris",), {"options": {"A": "Paris", "B": "Rome"}, "answer_idx": "A"}),
        ("A", ("A",), {"choices": ["A", "B"]}),
        ("B. J. Thomas", ("B. J. Thomas",), {"choices": ["Elvis", "B. J. Thomas"]}),
    ],
)
def test_lists_in_texts_and_numbers_are_read_as_a_person_means_them(tmp_path, answer, golds, fields) -> None:
    """A JSON list in a cell was one gold, and the year 1945.0 did not equal 1945."""
    [question] = load_questions(jsonl(tmp_path, {"question": "Q?", "answer": answer, **fields}))
    assert question.answers == golds


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        *(
            (text, "which may be one answer or several: write .*, or a JSON list of texts such as")
            for text in ("['a' 'b']", "('a', 'b')", "a|b", "[0, 1)", "array(['a'], dtype=object)", "[null]")
        ),
        ("[-2, 7]", r"one answer or several: write \[\"\[-2, 7\]\"\], or a JSON list"),
        (0.1 + 0.2, "holds 0.30000000000000004, which was rounded"),
        ("[]", "has no gold answer"),
        (["3 + 3 = 6.\n#### 6"], "holds a whole solution, not its answer alone; .*data convert"),
        ("It is <<48/2=24>>24.", "holds a whole solution"),
        (r"So it is $\boxed{3}$.", "holds a whole solution"),
        (r"So it is $\fbox 3$.", "holds a whole solution"),
        ("<think>3</think><answer>3</answer>", "holds a whole solution"),
    ],
)
def test_an_answer_that_is_none_by_its_form_is_refused(tmp_path: Path, answer: object, reason: str) -> None:
    """Each was one literal gold, which no answer equals."""
    with pytest.raises(UsageError, match=f"row 1: .*{reason}"):
        load_questions(jsonl(tmp_path, {"question": "Q?", "answer": answer}))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ([pa.array([2**62], pa.timestamp("us"))], "row 1: not readable as parquet"),
        # Timestamp: with pandas
        ([pa.array([1_234_567_891], pa.timestamp("ns", tz="Europe/Paris"))], "as parquet|not Timestamp"),
        ([pa.array([2**62], pa.duration("s"))], "row 1: not readable as parquet"),
        ([pa.array([datetime.date(1, 2, 3)])], "answer must contain texts or numbers, not date"),
        ([pa.array(["a"])] * 2, "row 1: two columns have one name"),  # readers keep the last one
    ],
)
def test_columns_of_answers_that_are_none_are_refused(tmp_path, columns, reason):
    """Dates and durations that Python cannot hold ended with "internal error"."""
    table = pa.table([["When?"], *columns], ["question", *["answer"] * len(columns)])
    pq.write_table(table, tmp_path / "own.parquet")
    with pytest.raises(UsageError, match=reason):
        load_questions(tmp_path / "own.parquet")


def test_a_published_row_becomes_a_question(tmp_path: Path) -> None:
    tricky = "What begins with\nFirst, provide a simple explanation of the question"
    path = parquet(
        tmp_path / "published.parquet",
        published_row("Where?", ["Paris", "$"]),
        published_row("Where?", ["Rome"]),
        published_row(tricky, ["a"], "w-book-6600-256-test"),
        published_row("How many?", ["3"], "hotpotqa/hotpot_qa"),
        published_row(f"{DAPO_OPENING}Find $x$.", ["4"], "dapo-math-256-test"),  # not a raw row of DAPO's
    )
    assert load_questions(path) == [
        Question(sha1("Where?"), "PopQA", "Where?", ("Paris", "$"), "qa"),
        Question(sha1("Where?") + "-2", "PopQA", "Where?", ("Rome",), "qa"),
        Question(sha1(tricky), "BookSum", tricky, ("a",), "text"),
        Question(sha1("How many?"), "mixed", "How many?", ("3",), "qa"),
        Question(sha1(f"{DAPO_OPENING}Find $x$."), "DAPO-Math", f"{DAPO_OPENING}Find $x$.", ("4",), "math"),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (published_row("", ["x"]), "question contains an empty text"),
        (published_row("Q?", []), "ground_truth has no gold"),
        ({**published_row("Q?", ["x"]), "prompt": None}, "not a row of the published"),
        ({**published_row("Q?", ["x"]), "prompt": [{"content": "Q?"}]}, "'Question: ', the question and"),
        ({**published_row("Q?", ["x"]), "data_source": None}, "data_source must be a text"),
    ],
)
def test_the_error_for_a_bad_published_row_names_file_row_and_reason(
    tmp_path: Path, row: dict[str, object], reason: str
) -> None:
    path = parquet(tmp_path / "published.parquet", published_row("Where?", ["Paris"]), row)
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


QUESTIONS = [Question(str(number), "d", f"Question {number}?", ("x",)) for number in range(10)]


def ids(questions: list[Question]) -> list[str]:
    return [question.id for question in questions]


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
    assert sample_questions(["mini"], "validation", 0, 100) == mini_questions(0, "validation")[:100]


def test_a_symbolic_link_in_place_of_the_partial_file_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / ".own.jsonl.partial").symlink_to(target)
    write_questions(tmp_path / "own.jsonl", [Question("1", "own", "Wer ist Ägidius?", ("Anna",))])
    assert target.read_text() == "precious"
    assert [question.text for question in load_questions(tmp_path / "own.jsonl")] == ["Wer ist Ägidius?"]


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
