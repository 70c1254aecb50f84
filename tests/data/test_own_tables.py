"""A table of the user's own becomes a question file, whatever its columns are called."""

import pytest

from prompt_r1.data.__main__ import main
from prompt_r1.data.files import load_questions
from prompt_r1.errors import UsageError

CSV = (
    '\ufefffrage,antwort,mehr\n"Who, then?","Anna ""A."" Berg",1\nWho?,42,2\n'
    '"Who, then?","Anna ""A."" Berg",3\nWho?,7,4\n'
)
FIELDS = ["--question-field", "frage", "--answer-field", "antwort"]


def convert(path, *more):
    out = path.with_name("own.jsonl")
    main(["convert", "--from", "questions", "--in", str(path), "--out", str(out), *more])
    return load_questions(out)


def test_a_csv_with_its_own_column_names_becomes_questions(tmp_path):
    """My CSV had no way in, and the advice named a converter that could not take it."""
    path = tmp_path / "mine.csv"
    path.write_text(CSV, "utf-8")
    questions = convert(path, *FIELDS)
    found = [(question.text, question.answers, question.dataset) for question in questions]
    assert found == [
        ("Who, then?", ('Anna "A." Berg',), "mine"),
        ("Who?", ("42",), "mine"),
        ("Who?", ("7",), "mine"),
    ]
    assert len({question.id for question in questions}) == 3


def test_a_json_list_with_several_answers_and_the_usual_names_needs_no_fields(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('[{"question": "Who?", "answer": ["Anna", "Ann"]}]')
    assert [question.answers for question in convert(path)] == [("Anna", "Ann")]


@pytest.mark.parametrize(
    ("more", "text", "reason"),
    [
        (
            [],
            CSV,
            "there is no column 'question'; name one of 'frage', 'antwort', 'mehr' by --question-field",
        ),
        (FIELDS, "frage,antwort\n,x\n", "row 1: the field frage contains an empty text"),
        (FIELDS, "frage,antwort\n", "the file contains no questions"),
    ],
)
def test_a_table_that_cannot_be_used_says_what_is_wrong(tmp_path, more, text, reason):
    path = tmp_path / "mine.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=reason):
        convert(path, *more)
    assert not (tmp_path / "own.jsonl").exists()


def test_the_advice_for_a_csv_is_the_command_that_takes_it(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(CSV, "utf-8")
    with pytest.raises(UsageError, match="convert it first") as refused:
        load_questions(path)
    command = str(refused.value).split("`")[1].split()
    assert command[:3] == ["python", "-m", "prompt_r1.data"]
    for column in ("frage", "antwort"):
        command[command.index("COLUMN")] = column
    main(command[3:])
    assert len(load_questions(path.with_suffix(".jsonl"))) == 3
