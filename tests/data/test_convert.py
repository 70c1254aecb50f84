"""Every layout of the datasets' raw dumps is converted to the questions of the paper; the mix draws the
promised numbers of them, and no question twice.
"""

import csv
import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prompt_r1.data.__main__ import main, mix
from prompt_r1.data.datasets import DAPO_CLOSING, DAPO_OPENING, DATASETS, mathqa
from prompt_r1.data.files import load_questions, write_questions
from prompt_r1.errors import UsageError
from prompt_r1.types import Question
from tests.support.questions import ids

Rows = list[dict[str, object]]


def dump(path: Path, rows: Rows | dict[str, object] | tuple[str, ...]) -> Path:
    """Write rows in the format of the path's suffix; a tuple is the lines of a text file."""
    if isinstance(rows, tuple):
        path.write_text("".join(f"{line}\n" for line in rows), "utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, rows[0].keys(), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    else:
        path.write_text(json.dumps(rows, indent=1), "utf-8")
    return path


def converted(path: Path, *flags: str) -> list[tuple[str, tuple[str, ...]]]:
    """Run `convert`, and return the question and gold answers of each row that it writes."""
    out = path.parent / "out.jsonl"
    main(["convert", "--in", str(path), "--out", str(out), *flags])
    return [(question.text, question.answers) for question in load_questions(out)]


@dataclass(frozen=True)
class Layout:
    """A raw dump in one of a dataset's layouts, and the only question that is in it."""

    source: str
    name: str  # of the file
    rows: Rows | dict[str, object]
    answers: tuple[str, ...] = ("Bob",)
    question: str = "Who?"


SOLUTION = "She sold 48/2 = <<48/2=24>>24 clips.\n#### -1,024"
DAPO_ROW = {
    "prompt": [{"role": "user", "content": f"{DAPO_OPENING}Find $x$.{DAPO_CLOSING}"}],
    "reward_model": {"ground_truth": "-3", "style": "rule"},
}
SQUAD_ROWS = [
    {"id": "s1", "question": "Who?", "answers": {"text": ["Bob", "Bob"], "answer_start": [12, 12]}},
    {"id": "s2", "question": "Why?", "answers": {"text": [], "answer_start": []}},
]
TRIVIA_ROWS = [
    {"question": "Who?", "question_id": "t1", "answer": {"value": "Bob", "aliases": ["Bob", "Rob"]}},
    {"question": "Why?", "question_id": "t2", "answer": {"value": "<unk>", "aliases": []}},
]
BOB = {"question": "Who?", "answer": "Bob"}
HOTPOT_ROW = BOB | {"context": [["Bob", ["Bob is a film."]]], "supporting_facts": [["Bob", 0]]}
MUSIQUE_ROW = BOB | {"id": "2hop__1", "answer_aliases": ["Rob", " ", "Bob"], "answerable": True}
UNANSWERABLE = MUSIQUE_ROW | {"id": "2hop__2", "answerable": False}
POPQA_ROW = {"id": 42, "question": "Who?", "possible_answers": '["Bob", "R. \\u00d6.", "The"]'}
BOOK = {"book_id": "Emma.chapters 1-2", "chapter": "x" * 200_000, "summary_text": "Emma, rich,\nis happy."}
EMMA = "Please write a short article based on the given title: Emma, chapters 1-2."
ARTICLE = {"id": "1", "document": "Long article.", "summary": "Short."}


def options(text: str, correct: str) -> dict[str, object]:
    """A row of MathQA."""
    return {"Problem": "Who?", "options": text, "correct": correct}


LAYOUTS = [
    Layout("hotpotqa", "train_v1.1.json", [{**HOTPOT_ROW, "_id": "5a", "level": "easy"}]),
    Layout("hotpotqa", "train.parquet", [{**BOB, "id": "5a", "context": {"title": ["Bob"]}}]),
    Layout("2wiki", "dev.json", [{**HOTPOT_ROW, "_id": "1", "answer_id": "Q1"}]),
    Layout("musique", "musique_full.jsonl", [MUSIQUE_ROW, UNANSWERABLE], ("Bob", "Rob")),
    Layout("popqa", "test.tsv", [POPQA_ROW], ("Bob", "R. Ö.", "The")),
    Layout("gsm8k", "train.jsonl", [BOB | {"answer": SOLUTION}], ("-1024",)),
    Layout("gsm8k", "test.jsonl", [BOB | {"answer": "#### is a heading.\n3 + 4 = 7\n#### 7"}], ("7",)),
    Layout("gsm8k", "main.parquet", [BOB | {"answer": "#### $5.50"}], ("5.50",)),
    Layout("dapo", "dapo-math-17k.parquet", [DAPO_ROW, DAPO_ROW], ("-3",), "Find $x$."),
    Layout("booksum", "train.csv", [BOOK], ("Emma, rich,\nis happy.",), EMMA),
    Layout("mathqa", "train.json", [options("a ) 1,500 m , b ) 33 1 / 3 % , e ) none", "a")], ("1,500 m",)),
    Layout("mathqa", "test.json", [options("a ) a ) 25 , b ) b ) 30", "b")], ("30",)),
    Layout("mathqa", "train.parquet", [options("['a ) 38', 'b ) 27.675', 'e ) none']", "b")], ("27.675",)),
    Layout("mathqa", "dev.json", [options("none", "a"), options("a ) 5 , b ) 6", "b")], ("6",)),
    Layout("squad", "train.parquet", SQUAD_ROWS),
    Layout("triviaqa", "validation.parquet", TRIVIA_ROWS, ("Bob", "Rob")),
    Layout("xsum", "train.parquet", [ARTICLE], ("Long article.",), "Please write an article: Short."),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.source}-{layout.name}")
def test_each_layout_of_a_dataset_is_converted_to_questions(tmp_path: Path, layout: Layout) -> None:
    path = dump(tmp_path / layout.name, layout.rows)
    assert converted(path, "--from", layout.source) == [(layout.question, layout.answers)]


@pytest.mark.parametrize(
    ("shown", "correct", "text"),
    [
        ("a ) 1,500 m , b ) 33 1 / 3 % , e ) none", "b", "33 1 / 3 %"),
        ("a ) rs . 1 , 200 , b ) rs . 300", "a", "rs . 1 , 200"),
        ("a ) a , b ) b , c ) both a and b", "c", "both a and b"),
        ("a ) a ) 25 , b ) b ) 30", "a", "25"),
        ("['a ) 38', 'b ) 27.675', 'e ) none']", "a", "38"),
        ('["a ) 38", "b ) 27.675", "e ) none"]', "e", "none"),
        ("a ) f ( a ) = 2 , b ) f ( a ) = 3", "a", "f ( a ) = 2"),
    ],
)
def test_the_options_of_mathqa_are_read_in_all_their_forms(shown: str, correct: str, text: str) -> None:
    """The text of an option may contain commas and the letter of an option with a bracket."""
    assert mathqa(options(shown, correct)) == ("Who?", (text,))


def test_a_raw_gsm8k_file_is_refused_with_the_command_that_converts_it(tmp_path, monkeypatch) -> None:
    """The whole solution was one gold, which no answer equals."""
    monkeypatch.chdir(tmp_path)
    path = dump(Path("train 1.jsonl"), [BOB | {"answer": SOLUTION}])
    with pytest.raises(UsageError) as refused:
        load_questions(path)
    [command] = re.findall("`(.*)`", str(refused.value))
    names = {"FILE": str(path), "NEW.jsonl": "new.jsonl"}
    main([names.get(word, word) for word in command.removeprefix("python -m prompt_r1.data").split()])
    [question] = load_questions("new.jsonl")
    assert question.answers == ("-1024",)


OWN_TABLES: dict[str, Rows] = {
    "company.csv": [{"question": "Who?", "gold": "Bob"}],
    "company.jsonl": [{"question": "Who?", "answers": ["Bob"]}],
    "company.tsv": [{"prompt": "Who?", "solution": "Bob"}],
}


@pytest.mark.parametrize("name", OWN_TABLES)
@pytest.mark.parametrize("source", DATASETS)
def test_a_table_without_the_columns_of_a_dataset_is_refused(tmp_path, source, name) -> None:
    path = dump(tmp_path / name, OWN_TABLES[name])
    with pytest.raises(UsageError):
        converted(path, "--from", source)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_blank_question_is_left_out(tmp_path: Path) -> None:
    """One blank question ended the conversion of its file."""
    rows = ({"question": " ", "answer": "#### 1"}, {"question": "Two?", "answer": "#### 2"})
    source = tmp_path / "gsm8k.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert converted(source, "--from", "gsm8k") == [("Two?", ("2",))]


def test_writingprompts_pairs_the_lines_of_two_files_in_the_form_of_the_published_files(tmp_path) -> None:
    """A bug: the prompt was detokenised, so `mix --exclude` missed 112 of the 128 published questions."""
    dump(
        tmp_path / "train.wp_target",
        ("He did n't . <newline> <newline> `` No , '' she said .", "Second one ."),
    )
    prompts = dump(tmp_path / "train.wp_source", ("[ WP ] You ca n't go !", "[ WP ] You ca n't  go !"))
    alone = dump(tmp_path / "test.wp_source", ("[ WP ] You ca n't go !",))
    with pytest.raises(UsageError, match=r"missing.*test\.wp_target"):
        converted(alone, "--from", "writingprompts")
    start = "Please write a short article based on the given title: "
    assert converted(prompts, "--from", "writingprompts") == [
        (f"{start}'You ca n't go !'", ("He did n't. \n \n `` No,'' she said.",))
    ]
    # A blank prompt or story ended the conversion.
    blank = dump(tmp_path / "blank.wp_source", ("[ WP ] First", " ", "[ WP ] Third", "Fourth"))
    dump(tmp_path / "blank.wp_target", ("One .", "Two .", " ", "Four ."))
    texts = [text for text, _ in converted(blank, "--from", "writingprompts")]
    assert texts == [f"{start}'First'", f"{start}'Fourth'"]
    dump(tmp_path / "train.wp_target", ("only one",))
    with pytest.raises(UsageError, match="different numbers of lines"):
        converted(prompts, "--from", "writingprompts")


def test_what_is_left_out_is_counted(tmp_path: Path, capsys) -> None:
    rows = [
        HOTPOT_ROW | {"question": "Who?", "answer": "Bob"},
        HOTPOT_ROW | {"question": "who? ", "answer": "Eve"},
        HOTPOT_ROW | {"question": "How?", "answer": None},
        HOTPOT_ROW | {"question": "Where?", "answer": "x"},
    ]
    path, out = dump(tmp_path / "dev.json", rows), tmp_path / "out.jsonl"
    main(["convert", "--from", "hotpotqa", "--in", str(path), "--out", str(out)])
    questions = load_questions(out)
    assert [question.text for question in questions] == ["Who?", "Where?"]
    assert ids(questions) == [hashlib.sha1(text).hexdigest() for text in (b"Who?", b"Where?")]
    assert {question.dataset for question in questions} == {"HotpotQA"}
    printed = capsys.readouterr().out
    assert "2 questions of HotpotQA" in printed and "left out: 1 (asked before)" in printed
    assert "1 (no answer)" in printed


@pytest.mark.parametrize(
    ("source", "name", "rows", "reason"),
    [
        ("gsm8k", "x.jsonl", [{"question": "Q?", "answer": "no mark"}], "row 1: .*####"),
        ("hotpotqa", "x.json", [HOTPOT_ROW, {"answer": "a", "context": ""}], "row 2: .*'question'"),
        ("2wiki", "x.json", [{"question": "Q?", "context": ""}], "row 1: .*'answer'"),
        ("hotpotqa", "x.json", ('[{"question": "Q?", "answer": "a"},',), ": not JSON .*line 2"),
        ("hotpotqa", "x.json", ("<html>",), ": not JSON .*begins with '<html>"),
        ("hotpotqa", "x.jsonl", (json.dumps(HOTPOT_ROW), "[1]"), "row 2: .* expected a JSON object"),
        ("popqa", "x.tsv", [{"question": "Q?", "possible_answers": "[oops"}], "row 1: .*Expecting value"),
        ("popqa", "x.jsonl", [{"question": "Q?", "possible_answers": "[" * 100_000}], "row 1: .*recursion"),
        (
            "popqa",
            "x.jsonl",
            [{"question": "Q?", "possible_answers": '"Rome"'}],
            "row 1: .*a list of answers",
        ),
        ("squad", "x.jsonl", [{"question": "Q?", "answers": {"text": "Rome"}}], "row 1: .*a list of answers"),
        ("mathqa", "x.json", [{"Problem": "Q?", "options": "a ) 1 , b ) 2", "correct": "c"}], "1 no answer"),
        ("musique", "x.jsonl", [BOB | {"answer_aliases": "b"}], "row 1: .*concatenate list"),
        ("squad", "x.jsonl", [{"question": "Q?", "answers": {}}], "row 1: .*KeyError: 'text'"),
        # The file that Salesforce publishes has the paths of the texts only.
        ("booksum", "x.jsonl", [{"book_id": "Emma"}], "row 1: .*KeyError: 'summary_text'"),
        ("xsum", "x.parquet", ("no parquet",), ": not readable as parquet"),
        ("xsum", "x.txt", ("x",), "not a file of rows"),
        ("hotpotqa", "out.jsonl", [BOB], "must not be among the files that"),
        ("hotpotqa", "x.json", [], r"no question is left \(no rows"),
    ],
)
def test_the_error_for_a_row_with_another_layout_names_file_row_and_reason(
    tmp_path: Path, source: str, name: str, rows, reason: str
) -> None:
    with pytest.raises(UsageError, match=rf"{name[:2]}.*{reason}"):
        converted(dump(tmp_path / name, rows), "--from", source)


def numbered_questions(count: int, dataset: str = "HotpotQA") -> list[Question]:
    return [Question(str(n), dataset, f"{dataset} question {n}?", ("x",)) for n in range(count)]


def test_the_mix_draws_equally_many_of_each_dataset_and_counts_them(tmp_path: Path, capsys) -> None:
    write_questions(tmp_path / "hotpot.jsonl", numbered_questions(50))
    write_questions(tmp_path / "popqa.jsonl", numbered_questions(12, "PopQA"))  # the same ids
    write_questions(tmp_path / "test.jsonl", numbered_questions(5))
    command = ["mix", "--per-dataset", "20", "--exclude", str(tmp_path / "test.jsonl"), "--in"]
    command += [str(tmp_path / "hotpot.jsonl"), str(tmp_path / "popqa.jsonl")]

    def drawn(*flags: str) -> list[Question]:
        main([*command, "--out", str(tmp_path / "train.jsonl"), *flags])
        return load_questions(tmp_path / "train.jsonl")

    questions = drawn()
    assert capsys.readouterr().out.splitlines()[1:] == ["  HotpotQA: 20", "  PopQA: 12"]
    texts = {question.text for question in questions}
    assert len(questions) == len(texts) == 32
    assert not texts & {question.text for question in numbered_questions(5)}
    assert [question.dataset for question in questions[:8]] != ["HotpotQA"] * 8  # shuffled
    assert drawn() == questions
    other = drawn("--seed", "1")
    assert {question.text for question in other} != texts


def test_a_file_is_split_by_dataset_and_the_parts_share_no_text(tmp_path: Path, capsys) -> None:
    own, train, test = tmp_path / "own.jsonl", tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    hotpot, popqa = numbered_questions(60), numbered_questions(30, "PopQA")
    popqa = [replace(question, id=f"p{question.id}") for question in popqa]
    again = [replace(question, id=f"again {question.id}") for question in hotpot[:10]]
    write_questions(own, [*hotpot, *popqa, *again])
    main(["split", "--in", str(own), "--out", str(train), "--test", str(test), "--share", "0.3"])
    training, held_out = load_questions(train), load_questions(test)
    assert Counter(question.dataset for question in held_out) == {"HotpotQA": 21, "PopQA": 9}
    assert not {question.text for question in training} & {question.text for question in held_out}
    assert {question.text for question in [*training, *held_out]} == {one.text for one in hotpot + popqa}
    assert f"{train}: {len(training)} questions to train on" in capsys.readouterr().out


def test_a_question_is_drawn_once_despite_differences_in_case_blanks_and_dataset() -> None:
    """The first spelling is kept; a test question is left out in every spelling, also in DAPO's wrapper."""
    hotpot, popqa = ("Where is it?", "where  IS it? ", "Who?", "Why?"), ("Where is it?", "When?")
    questions = [Question(text, "HotpotQA", text, ("x",)) for text in hotpot]
    questions += [Question(text, "PopQA", text, ("x",)) for text in popqa]
    wrapped = f"{DAPO_OPENING}who?  {DAPO_CLOSING}"
    drawn = mix(questions, 9, seed=0, exclude=[Question("1", "test", wrapped, ("x",))])
    assert sorted(question.text for question in drawn) == ["When?", "Where is it?", "Why?"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("mix --in own.jsonl --out own.jsonl", "must not be among"),
        ("split --in own.jsonl --out own.jsonl --test o.jsonl", "must not be among"),
        ("split --in own.jsonl --out o.jsonl --test o.jsonl", "must not be among"),
        ("split --in own.jsonl --out o.jsonl --test p.json", "p.json: only .jsonl files can be written"),
        (
            "split --in own.jsonl --out o.jsonl --test p.jsonl --share 1",
            "--share must be between 0 and 1, not 1",
        ),
        ("split --in own.jsonl --out o.jsonl --test p.jsonl --seed 1", "unrecognized arguments: --seed 1"),
        ("mix --in own.jsonl --exclude o.jsonl --out o.jsonl", "must not be among"),
        ("mix --in own.jsonl --out o.jsonl --per-dataset 0", "--per-dataset must be at least 1, not 0"),
        ("convert --from hotpotqa --in nowhere.json --out o.jsonl", "no such file"),
    ],
)
def test_values_that_do_not_fit_are_usage_errors(line: str, reason: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=reason):
        main(line.split())
    assert not list(tmp_path.iterdir())


def test_the_name_of_a_dataset_cannot_clear_the_terminal(tmp_path: Path, capsys) -> None:
    path = tmp_path / "hostile.jsonl"
    write_questions(path, numbered_questions(3, "\x1b[2J\u202etowns"))
    main(["mix", "--in", str(path), "--out", str(tmp_path / "mix.jsonl"), "--per-dataset", "2"])
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable() and r"\x1b[2J\u202etowns" in printed


def test_files_with_the_same_question_are_not_split_into_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A bug: both files held the id, and `load_questions` refused what `split` had written."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in files:
        path.write_text('{"question": "Who?", "answer": "Anna", "id": "q1"}\n')
    written = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    line = ["split", "--in", *map(str, files), "--out", str(written[0]), "--test", str(written[1])]
    with pytest.raises(UsageError, match=r"id 'q1' .*two files"):
        main(line)
    assert not any(path.exists() for path in written)


def test_other_columns_may_hold_lone_surrogates(tmp_path: Path) -> None:
    """A bug: `split` and `mix` ended with a UnicodeEncodeError when they wrote such a row."""
    path = tmp_path / "notes.jsonl"
    [question] = numbered_questions(1)
    write_questions(path, [replace(question, extra={"note": "\ud800, Zürich"})])
    assert load_questions(path)[0].extra["note"] == "\ud800, Zürich"
    assert "Zürich" in path.read_text("utf-8")
