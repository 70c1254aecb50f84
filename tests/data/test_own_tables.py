"""A table of the user's own becomes a question file, whatever its columns are called."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prompt_r1.data import rows
from prompt_r1.data.__main__ import main
from prompt_r1.data.files import load_questions
from prompt_r1.errors import UsageError

CSV = (
    '\ufefffrage,antwort,mehr\n"Who, then?","Anna ""A."" Berg",1\nWho?,42,2\n'
    '"Who, then?","Anna ""A."" Berg",3\nWho?,7,4\n'
)
FIELDS = ["--question-field", "frage", "--answer-field", "antwort"]


def convert(path):
    out = path.with_name("own.jsonl")
    main(["convert", "--from", "questions", "--in", str(path), "--out", str(out), *FIELDS])
    return load_questions(out)


def test_a_csv_with_its_own_column_names_becomes_questions(tmp_path):
    """My CSV had no way in, and the advice named a converter that could not take it."""
    path = tmp_path / "mine.csv"
    path.write_text(CSV, "utf-8")
    questions = convert(path)
    found = [(question.text, question.answers, question.dataset) for question in questions]
    assert found == [
        ("Who, then?", ('Anna "A." Berg',), "mine"),
        ("Who?", ("42",), "mine"),
        ("Who, then?", ('Anna "A." Berg',), "mine"),
        ("Who?", ("7",), "mine"),
    ]
    assert len({question.id for question in questions}) == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("frage,antwort\n,x\n", "row 1: the field frage contains an empty text"),
        ("frage,antwort\n", "there are no questions in it"),
    ],
)
def test_a_table_that_cannot_be_used_says_what_is_wrong(tmp_path, text, reason):
    path = tmp_path / "mine.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=reason):
        convert(path)
    assert not (tmp_path / "own.jsonl").exists()


def test_the_advice_for_a_csv_is_a_command_that_takes_it(tmp_path):
    path, out = tmp_path / "mine.csv", tmp_path / "own.jsonl"
    path.write_text(CSV, "utf-8")
    reason = r"question is missing \(there are: 'frage', 'antwort', 'mehr'\); .*--question-field COLUMN"
    with pytest.raises(UsageError, match=reason) as refused:
        load_questions(path)
    command = str(refused.value).split("`")[1].split()
    assert command[:3] == ["python", "-m", "prompt_r1.data"]
    for column in ("frage", "antwort"):
        command[command.index("COLUMN")] = column
    main([*command[3:], "--in", str(path), "--out", str(out)])
    assert load_questions(out) == load_questions(path, question_field="frage", answer_field="antwort")


@pytest.mark.parametrize("name", ["own.csv", "own.tsv", "own.json", "own.parquet"])
def test_a_table_with_the_usual_columns_needs_no_conversion(tmp_path, name):
    rows = [{"question": "Who?", "answer": "Anna", "kind": "math", "day": datetime.date(1, 2, 3)}]
    path = tmp_path / name
    if name == "own.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name == "own.json":
        path.write_text(json.dumps(rows, default=str))
    else:
        separator = "\t" if name == "own.tsv" else ","
        path.write_text("\n".join(separator.join(map(str, row)) for row in (rows[0], rows[0].values())))
    [question] = load_questions(path)
    assert (question.text, question.answers, question.kind) == ("Who?", ("Anna",), "math")


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([2**62], pa.timestamp("us")), "row 1: not readable as parquet"),
        # Timestamp: with pandas
        (pa.array([1_234_567_891], pa.timestamp("ns", tz="Europe/Paris")), "as parquet|not Timestamp"),
        (pa.array([2**62], pa.duration("s")), "row 1: not readable as parquet"),
        (pa.array([datetime.date(1, 2, 3)]), "answer must contain texts or numbers, not date"),
    ],
)
def test_dates_and_durations_that_are_no_answers_are_refused(tmp_path, column, reason):
    """Those that Python cannot hold ended with "internal error"."""
    pq.write_table(pa.table({"question": ["When?"], "answer": column}), tmp_path / "own.parquet")
    with pytest.raises(UsageError, match=reason):
        load_questions(tmp_path / "own.parquet")


def test_a_text_that_many_rows_of_a_small_parquet_file_share_is_bounded(tmp_path):
    """2,000 rows of one text of ten million characters take 1 kB in the file, and 20 GB as texts."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000, pa.int32()), pa.array(["x" * 10_000_000]))
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"question": texts, "answer": ["a"] * 2_000}), path, compression="zstd")
    with pytest.raises(UsageError, match="row 1: the field question has 10,000,000 characters"):
        load_questions(path)


def test_a_line_that_does_not_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LARGEST_ROW", 1_000)
    path = tmp_path / "endless.jsonl"
    path.write_text('{"question": "Q?", "answer": "a"}\n{"question": "' + "x" * 5_000)
    with pytest.raises(UsageError, match="row 2: the line has over 1,000 bytes"):
        load_questions(path)
