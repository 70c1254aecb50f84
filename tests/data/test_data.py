"""Question files are read as documented, bad rows are named, and steps take questions in a fixed order."""

import csv
import datetime
import hashlib
import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prompt_r1.data import questions as questions_module
from prompt_r1.data.__main__ import main as data_main
from prompt_r1.data.files import load_questions, question_key, write_questions
from prompt_r1.data.questions import find_questions, sample_questions, training_and_validation
from prompt_r1.data.rows import read_rows
from prompt_r1.data.sampler import digest_of, stratified
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.questions import TRAINING_MIX, mini_questions
from prompt_r1.types import Question
from tests.support.paths import PUBLISHED
from tests.support.published import parquet, published_row
from tests.support.questions import ids


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "cities.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def sha1(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def test_a_json_line_becomes_a_question(tmp_path: Path) -> None:
    full = {"id": "q1", "question": "Where?", "answers": ["Paris", "P."], "dataset": "towns", "kind": "math"}
    full |= {"answer": "P."}  # not read: `answers` comes first
    minimal = {"question": "Why?", "answer": "Because"}
    others = {"id": 7, "question": "Why not?", "golden_answers": [42, -1.5], "dataset": "gsm8k"}
    assert load_questions(jsonl(tmp_path, full, minimal, others)) == [
        Question("q1", "towns", "Where?", ("Paris", "P."), "math"),
        Question(sha1("Why?"), "cities", "Why?", ("Because",), "qa"),
        Question("7", "gsm8k", "Why not?", ("42", "-1.5"), "math"),
    ]


def test_other_fields_of_a_row_are_extra(tmp_path: Path) -> None:
    row = {"question": "Why?", "answer": "Because"}
    [plain] = load_questions(jsonl(tmp_path, row))
    [found] = load_questions(jsonl(tmp_path, row | {"level": 3, "hints": ["a"]}))
    assert (plain.extra, found.extra) == ({}, {"level": 3, "hints": ["a"]})
    assert digest_of([plain]) != digest_of([found])  # a reward may depend on them


def test_an_object_of_a_users_function_has_the_same_digest_in_every_process() -> None:
    """A bug: the text of an object has its address, so its run could not be resumed."""
    question = Question("q", "d", "Why?", ("Because",))
    one, another = (replace(question, extra={"world": object(), "level": 3}) for _ in range(2))
    assert digest_of([one]) == digest_of([another])


def test_a_table_with_keys_that_are_no_texts_may_stand_in_a_row_of_a_users_function() -> None:
    """A bug: JSON has no such keys, so the digest ended the run with a TypeError."""
    question = Question("q", "d", "Why?", ("Because",), extra={"grid": {(0, 1): "wall"}})
    assert digest_of([question]) == digest_of([question])


def test_other_fields_survive_writing_and_mixing(tmp_path: Path) -> None:
    """They were lost, and a reward that reads them then raised in the first step."""
    rows = [{"question": f"{n}?", "answer": "a", "level": n, "é": [None, "ü"]} for n in range(4)]
    own, mixed = tmp_path / "own.jsonl", tmp_path / "mixed.jsonl"
    write_questions(own, load_questions(jsonl(tmp_path, *rows)))
    data_main(["mix", "--in", str(own), "--out", str(mixed), "--per-dataset", "4"])
    found = {question.text: question.extra for question in load_questions(mixed)}
    assert found == {row["question"]: {"level": row["level"], "é": [None, "ü"]} for row in rows}


def test_the_kind_of_a_question_follows_from_the_name_of_its_dataset(tmp_path: Path) -> None:
    """A name that only contains a dataset's, as tax_summary contains xsum, was scored as that dataset.

    A bug: the names of the published files gave the paper's name, but not its kind.
    """
    names = {
        "math": ("gsm8k", "DAPO-Math", "math_qa", "gsm8k-256-test"),
        "text": ("BookSum", "WritingPrompts", "xsum", "w-book-6600-256-test", "wp"),
        "qa": ("hotpotqa", "anything", "tax_summary", "not_gsm8k"),
    }
    for kind, datasets in names.items():
        rows = [{"question": "Q?", "answer": "A", "dataset": dataset} for dataset in datasets]
        found = [(question.dataset, question.kind) for question in load_questions(jsonl(tmp_path, *rows))]
        assert found == [(dataset, kind) for dataset in datasets]
    # Search-R1's files have question, golden_answers and data_source.
    row = {"question": "Q?", "golden_answers": ["A"], "data_source": "wp"}
    [question] = load_questions(jsonl(tmp_path, row))
    assert (question.dataset, question.kind, question.extra) == ("WritingPrompts", "text", {})


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
        ({"question": "Q?"}, "answers is missing"),
        ({"question": "Q?", "answers": []}, "answers has no gold answer"),
        ({"question": "Q?", "answers": [["x"]]}, "not list"),
        (b'{"question": "Q?", "answers": [NaN]}', "not float"),
        ({**GOOD, "question": "Q?"}, "another row has the id '1' too"),
        ({**GOOD, "id": None}, "id must contain texts or numbers, not null"),
        ({**GOOD, "id": "2", "kind": "poem"}, "kind is 'poem'; choose one of qa, math, text"),
        ({**GOOD, "id": "2", "dataset": None}, "dataset must be a text, not null"),
        ({"Question": "Q?", "Answer": "x"}, r"question is missing \(there are: 'Question', 'Answer'\)"),
        ({"question": "Q?", "answers": {"text": ["x"]}}, "answers must contain texts or numbers, not dict"),
        ({"question": "Q?", "answers": "[]"}, "answers has no gold answer"),
        (b'{"question": "Q', r"not JSON .*begins with '\{\"question\": \"Q': write one object in each line"),
        (b"<!DOCTYPE html>", "not JSON .*begins with '<!DOCTYPE html>'"),
        (b"{'question': 'Q?', 'answer': 'a'}", "not JSON .*in double quotes"),
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
    assert ids(questions) == [sha1("Where?"), f"{sha1('Where?')}-3"]
    assert "cities.jsonl: 1 of 2 questions repeat" in capsys.readouterr().err


def test_published_rows_keep_their_own_ids(tmp_path: Path) -> None:
    """A bug: two rows with one question were refused under an id that nobody had written."""
    row = published_row("Where?", ["Here"])
    questions = load_questions(jsonl(tmp_path, {**row, "id": 1}, {**row, "id": "b"}, row))
    assert ids(questions) == ["1", "b", sha1("Where?")]


def test_validation_questions_that_are_trained_on_are_counted_once(tmp_path, capsys, monkeypatch) -> None:
    """They were validated on without a word, and the agent looked better than it was; then by every rank."""
    for name, texts in (("a", ("Where?", "Who?")), ("b", ("where? ", "Why?"))):
        write_questions(tmp_path / f"{name}.jsonl", [Question(text, "d", text, ("x",)) for text in texts])
    files = [str(tmp_path / "a.jsonl")], [str(tmp_path / "b.jsonl")]
    training_and_validation(*files, seed=0, limit=0)
    said = capsys.readouterr().err
    assert "1 of 2 validation questions" in said
    training_and_validation(["mini"], ["mini"], seed=0, limit=0)
    monkeypatch.setenv("RANK", "1")
    training_and_validation(*files, seed=0, limit=0)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "wp_source"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_that_is_not_utf_8_is_refused_with_its_line_and_advice(tmp_path, suffix, encoding) -> None:
    """Of a Latin-1 file the advice was to write each row in a line of its own."""
    path = tmp_path / f"own.{suffix}"
    path.write_bytes("question,answer\nWhere?,Zürich\n".encode(encoding))
    path.with_suffix(".wp_target").write_text("One story.\n")
    line = 2 if encoding == "latin-1" else 1
    with pytest.raises(UsageError, match=rf"own\.{suffix}, line {line}: .*not UTF-8: .*UTF-8"):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere.jsonl", "no such file"), ("own.txt", "not a file of rows"), (".", "not a file of rows")],
)
def test_what_holds_no_rows_is_refused(tmp_path, name, reason) -> None:
    (tmp_path / "own.txt").write_text("Where?")
    with pytest.raises(UsageError, match=reason):
        load_questions(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("own.JSONL", '{"question": "Q?", "answer": "a"}'),
        ("own.jsonl", '{"question": "Q?",\t"answer": "a"}\r\n'),
        ("own.json", '{\n"question": "Q?",\n"answer": "a"\n}'),
        ("own.json", '{"question": "Q?", "answer": "a"}\n'),
        ("own.TSV", "question\tanswer\nQ?\ta\n"),
        ("own.csv", "question,answer\n\nQ?,a\n\n"),
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
        (
            "question,answer\nWhere?,Paris, France\n",
            r"row 1: more or fewer cells than the 2 columns .*double quotes",
        ),
        ("question,answer,id\nWhere?,Paris\n", "row 1: more or fewer cells than the 3 columns"),
        ("# a comment\nquestion,answer\nWhere?,Paris\n", r"row 1: .*1 columns \(# a comment\)"),
        ("question;answer\nA?;B\n", r"row 1: .*question is missing \(there are: 'question;answer'\)"),
        (
            'question,answer\nA?,B\nC?,"D" E\n',
            "row 2: not readable .*at both ends of a text, and write each quote inside the text twice",
        ),
        ('question,answer\nA?,"B\nC?,D\n', "row 1: not readable"),
        ("question,answer\n,x\n", "row 1: the field question contains an empty text"),
        ("question,answer\n", "there are no questions in it"),
    ],
)
def test_a_table_that_would_be_read_otherwise_than_it_was_written_is_refused(tmp_path, table, reason) -> None:
    """`Where?,Paris, France` had the gold Paris, and nothing was said."""
    (tmp_path / "own.csv").write_text(table, "utf-8")
    with pytest.raises(UsageError, match=reason):
        load_questions(tmp_path / "own.csv")


@pytest.mark.parametrize(
    ("answer", "golds"),
    [
        ('["Paris", "City of Paris"]', ("Paris", "City of Paris")),
        ('["[0, 1)"]', ("[0, 1)",)),
        (1945.0, ("1945",)),
        (-0.0, ("0",)),
        (-0.5, ("-0.5",)),
        (0.1 + 0.2, ("0.30000000000000004",)),
        ("Who\ud800", ("Who?",)),
        ([1945.0, "1945.0", "a|b"], ("1945", "1945.0", "a|b")),
        *(
            (text, (text,))
            for text in ("007", "1945.0", "True", "NA", "2020-01-01", "1/2", "[-2, 7]", "[0, 1)")
        ),
    ],
)
def test_numbers_are_read_as_a_person_writes_them_and_json_lists_as_lists(tmp_path, answer, golds) -> None:
    """A JSON list in a cell was one gold, and the year 1945.0 did not equal 1945. Other texts stay texts."""
    [question] = load_questions(jsonl(tmp_path, {"question": "Q?", "answer": answer}))
    assert question.answers == golds


def test_the_first_field_of_answers_counts(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": "A?", "golden_answers": ["Paris"], "answer": "London"},
        {"question": "B?", "answers": "Rome", "answer": "Oslo"},
    ]
    found = [question.answers for question in load_questions(jsonl(tmp_path, *rows))]
    assert found == [("Paris",), ("Rome",)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("['a' 'b']", r"a list that is not JSON, .*write it as \[\"Paris\", \"City of Paris\"\]"),
        ("['a', 'b']", "a list that is not JSON"),
        ('["a"', "a list that is not JSON"),
        ('["a", ' + "[" * 200_000, "a list that is not JSON"),
        ("It is 6.\n#### 6", "a whole solution with ####: .*data convert --from gsm8k --in FILE"),
        (["It is 6.\n#### 6"], "a whole solution with ####"),
        (True, "not bool"),
    ],
)
def test_an_answer_that_is_none_by_its_form_is_refused(tmp_path: Path, answer: object, reason: str) -> None:
    """Each was one literal gold, which no answer equals."""
    with pytest.raises(UsageError, match=f"row 1: .*{reason}"):
        load_questions(jsonl(tmp_path, {"question": "Q?", "answer": answer}))


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([2**62], pa.timestamp("us")), ": not readable as parquet"),
        # With pandas it is a Timestamp.
        (pa.array([1_234_567_891], pa.timestamp("ns", tz="Europe/Paris")), "as parquet|not Timestamp"),
        (pa.array([2**62], pa.duration("s")), ": not readable as parquet"),
        (pa.array([datetime.date(1, 2, 3)]), "answer must contain texts or numbers, not date"),
    ],
)
def test_columns_of_answers_that_are_none_are_refused(tmp_path, column, reason):
    """Dates and durations that Python cannot hold ended with "internal error"."""
    table = pa.table([["When?"], column], ["question", "answer"])
    pq.write_table(table, tmp_path / "own.parquet")
    with pytest.raises(UsageError, match=reason):
        load_questions(tmp_path / "own.parquet")


def test_the_rows_of_a_parquet_file_are_numbered_up_to_its_end(tmp_path):
    path = parquet(tmp_path / "many.parquet", *({"question": f"{number}?"} for number in range(200)))
    assert [number for number, _ in read_rows(path)] == [*range(1, 201)]


def test_a_parquet_file_is_read_a_few_rows_at_a_time(tmp_path):
    """A bug would only cost memory: each row may contain a book, and all were in memory at once."""
    size, count = 10_000, 1000
    questions = [f"{number:0{size}}" for number in range(count)]
    table = pa.table({"question": questions, "answer": ["a"] * count})
    pq.write_table(table, tmp_path / "books.parquet")
    del questions, table
    tracemalloc.start()
    try:
        read = sum(len(row["question"]) for _, row in read_rows(tmp_path / "books.parquet"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == size * count
    assert peak < read / 4


def test_a_published_row_becomes_a_question(tmp_path: Path) -> None:
    tricky = "What begins with\nFirst, provide a simple explanation of the question"
    path = parquet(
        tmp_path / "published.parquet",
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


def test_a_sample_of_the_mini_world_and_a_file_has_the_share_of_both(tmp_path: Path) -> None:
    """A sample of the first questions would hold none of the file: only the mini world's are shuffled."""
    own = [Question(f"own {number}", "own", f"{number}?", ("x",)) for number in range(40)]
    write_questions(tmp_path / "own.jsonl", own)
    sample = sample_questions(["mini", str(tmp_path / "own.jsonl")], "validation", 0, 50)
    counts = Counter(question.dataset for question in sample)
    assert counts["own"] == 10, "40 of 200 questions are of the file"
    assert all(counts[kind] == 8 for kind in TRAINING_MIX)


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


def test_holding_out_takes_linear_time(monkeypatch):
    """Looking through the held-out texts for each question took 11 s for 40,960 questions."""
    calls = Counter[str]()

    def counted(text: str) -> str:
        calls["question_key"] += 1
        return question_key(text)

    monkeypatch.setattr(questions_module, "question_key", counted)
    training, validation = training_and_validation(["mini"], ["held-out"], seed=0, limit=400)
    assert len(training) + len(validation) == 4096
    assert calls["question_key"] == 4096 + 400
