"""Raw dumps, in each layout that a dataset ships in → the questions that the paper asks."""

import csv
import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prompt_r1.data.__main__ import main
from prompt_r1.data.fields import DAPO_CLOSING, DAPO_OPENING
from prompt_r1.data.files import load_questions
from prompt_r1.data.sources import SOURCES, detokenise
from prompt_r1.errors import UsageError

Rows = list[dict[str, object]]


def dump(path: Path, rows: Rows | dict[str, object] | tuple[str, ...]) -> Path:
    """The rows as a file of the path's kind; a tuple is the lines of a text file."""
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
    """Question and golds of each row that `convert` writes."""
    out = path.parent / "out.jsonl"
    main(["convert", "--in", str(path), "--out", str(out), *flags])
    return [(question.text, question.answers) for question in load_questions(out)]


NESTED = {"question": {"text": "Who?", "tokens": []}, "document": {"text": "a whole book"},
          "answers": [{"text": "Bob", "tokens": []}, {"text": "Rob", "tokens": []}]}  # fmt: skip
WORKED = "She sold 48/2 = <<48/2=24>>24 clips.\n#### -1,024"
SQUAD = {"data": [{"title": "Paris", "paragraphs": [{"context": "Paris is in France.", "qas": [
    {"id": "s1", "question": "Where?", "is_impossible": False,
     "answers": [{"text": "France", "answer_start": 12}, {"text": "France", "answer_start": 12}]},
    {"id": "s2", "question": "Why?", "is_impossible": True, "answers": []}]}]}]}  # fmt: skip
DAPO_ROW = {"prompt": [{"role": "user", "content": f"{DAPO_OPENING}Find $x$.{DAPO_CLOSING}"}],
            "reward_model": {"ground_truth": "-3", "style": "rule"}}  # fmt: skip
TRIVIA_ANSWER = {"Value": "Bob", "Aliases": ["Robert", "Bob"], "NormalizedValue": "bob"}
TRIVIA = {"Data": [{"Question": "Who?", "QuestionId": "t1", "Answer": TRIVIA_ANSWER}]}
HOP = {
    "id": "2hop__1",
    "question": "Who?",
    "answer": "Bob",
    "answer_aliases": ["Rob", "Bob"],
    "answerable": True,
}

LAYOUTS: list[tuple[str, str, Rows | dict[str, object], list[tuple[str, tuple[str, ...]]]]] = [
    ("hotpotqa", "train_v1.1.json", [{"_id": "5a", "question": "Who?", "answer": "Bob", "level": "easy"}],
     [("Who?", ("Bob",))]),
    ("hotpotqa", "train.parquet", [{"id": "5a", "question": "Who?", "answer": "yes", "type": "bridge"}],
     [("Who?", ("yes",))]),
    ("2wiki", "dev.json", [{"_id": "1", "question": "Who?", "answer": "Bob", "answer_id": "Q1"}],
     [("Who?", ("Bob",))]),
    ("musique", "musique_full_v1.0_train.jsonl",
     [HOP, {**HOP, "id": "2hop__2", "question": "Why?", "answerable": False}],
     [("Who?", ("Bob", "Rob"))]),
    ("popqa", "test.tsv", [{"id": "42", "question": "Who?", "possible_answers": '["Bob", "R. \\u00d6."]'}],
     [("Who?", ("Bob", "R. Ö."))]),
    ("popqa", "test.parquet", [{"id": 42, "question": "Who?", "possible_answers": '["Bob"]'}],
     [("Who?", ("Bob",))]),
    ("gsm8k", "train.jsonl", [{"question": "How many?", "answer": WORKED}], [("How many?", ("-1024",))]),
    ("gsm8k", "test.jsonl", [{"question": "How long?", "answer": "#### is a heading.\n3 + 4 = 7\n#### 7"}],
     [("How long?", ("7",))]),
    ("gsm8k", "main.parquet", [{"question": "How much?", "answer": "#### $5.50"}],
     [("How much?", ("5.50",))]),
    ("dapo", "dapo-math-17k.parquet", [DAPO_ROW, DAPO_ROW], [("Find $x$.", ("-3",))]),
    ("dapo", "processed.parquet", [{"prompt": "Find $x$.", "solution": "-3"}], [("Find $x$.", ("-3",))]),
    ("booksum", "train.csv",
     [{"book_id": "Emma.chapters 1-2", "chapter": "x" * 200_000, "summary_text": "Emma, rich,\nis happy."}],
     [("Please write a short article based on the given title: Emma, chapters 1-2.",
       ("Emma, rich,\nis happy.",))]),
    ("booksum", "train.jsonl",
     [{"book_title": "Emma", "chapter_id": "chapter 1", "summary": [{"text": "One."}, {"text": "Two."}]}],
     [("Please write a short article based on the given title: Emma, chapter 1.", ("One.", "Two."))]),
    ("mathqa", "train.json", [{"Problem": "how far ?", "options": "a ) 1,500 m , b ) 33 1 / 3 % , e ) none",
                               "correct": "a"}], [("how far ?", ("1,500 m",))]),
    ("mathqa", "test.json", [{"Problem": "how far ?", "options": "a ) a ) 25 , b ) b ) 30", "correct": "b"}],
     [("how far ?", ("30",))]),
    ("mathqa", "train.parquet", [{"Problem": "how far ?", "options": "['a ) 38', 'b ) 27.675', 'e ) none']",
                                  "correct": "b"}], [("how far ?", ("27.675",))]),
    ("squad", "train-v2.0.json", SQUAD, [("Where?", ("France",))]),
    ("squad", "train.parquet", [{"id": "s1", "question": "Where?", "answers": {"text": ["France"]}}],
     [("Where?", ("France",))]),
    ("triviaqa", "unfiltered-web-dev.json", TRIVIA, [("Who?", ("Bob", "Robert"))]),
    ("triviaqa", "validation.parquet",
     [{"question": "Who?", "question_id": "t1", "answer": {"value": "Bob", "aliases": ["Bob", "Rob"]}},
      {"question": "Why?", "question_id": "t2", "answer": {"value": "<unk>", "aliases": []}}],
     [("Who?", ("Bob", "Rob"))]),
    ("xsum", "train.parquet", [{"id": "1", "document": "Long article.", "summary": "Short."}],
     [("Please write an article: Short.", ("Long article.",))]),
    ("narrativeqa", "qaps.csv", [{"set": "train", "question": "Who?", "answer1": "Bob", "answer2": "Bob "}],
     [("Who?", ("Bob", "Bob "))]),
    ("narrativeqa", "train.parquet", [NESTED], [("Who?", ("Bob", "Rob"))]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "name", "rows", "wanted"), LAYOUTS, ids=[f"{x[0]}-{x[1]}" for x in LAYOUTS]
)
def test_each_layout_becomes_questions(tmp_path: Path, source: str, name: str, rows, wanted) -> None:
    assert converted(dump(tmp_path / name, rows), "--from", source) == wanted


def test_every_dataset_of_the_paper_has_a_layout_here() -> None:
    assert {layout[0] for layout in LAYOUTS} | {"writingprompts"} == set(SOURCES)


def test_writingprompts_are_pairs_of_lines_and_are_detokenised(tmp_path: Path) -> None:
    dump(
        tmp_path / "train.wp_target",
        ("He did n't . <newline> <newline> `` No , '' she said .", "Second one ."),
    )
    prompts = dump(tmp_path / "train.wp_source", ("[ WP ] You ca n't go !", "[ WP ] You ca n't  go !"))
    start = "Please write a short article based on the given title: "
    assert converted(prompts, "--from", "writingprompts") == [
        (f"{start}'You can't go!'", ('He didn\'t.\n\n"No," she said.',))
    ]
    dump(tmp_path / "train.wp_target", ("only one",))
    with pytest.raises(UsageError, match=r"row 2: .*different numbers of lines"):
        converted(prompts, "--from", "writingprompts")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [("I 'm gon na go , OK ?", "I'm gonna go, OK?"), ("( a sock . )", "(a sock.)"),
     ("the boys ' room", "the boys ' room"), ("$ 5 is 10 % off", "$5 is 10% off"),
     ("`` Hi '' , he said", '"Hi", he said')],
)  # fmt: skip
def test_detokenising_joins_what_the_tokeniser_split(tokens: str, text: str) -> None:
    assert detokenise(tokens) == text


# --- Options --------------------------------------------------------------------------------------


def test_options_choose_rows_and_golds(tmp_path: Path) -> None:
    squad = dump(tmp_path / "squad.json", SQUAD)
    flags = ("--from", "squad", "--with-context", "--unanswerable", "unanswerable")
    context = "Paris is in France.\n\n"
    assert converted(squad, *flags) == [
        (f"{context}Where?", ("France",)),
        (f"{context}Why?", ("unanswerable",)),
    ]
    trivia = dump(tmp_path / "trivia.json", TRIVIA)
    assert converted(trivia, "--from", "triviaqa", "--one-gold") == [("Who?", ("Bob",))]
    row = {"_id": "1", "question": "Who?", "answer": "Bob", "answer_id": "Q1"}
    wiki = dump(tmp_path / "dev.json", [row])
    names = ({"Q_id": "Q1", "aliases": ["Rob", "Bob"], "demonyms": ["Bobby"]},
             {"Q_id": "Q2", "aliases": ["X"], "demonyms": []})  # fmt: skip
    aliases = dump(tmp_path / "id_aliases.json", tuple(map(json.dumps, names)))
    flags = ("--from", "2wiki", "--aliases", str(aliases))
    assert converted(wiki, *flags) == [("Who?", ("Bob", "Rob", "Bobby"))]
    rows: Rows = [{"set": part, "question": f"Who {part}?", "answer1": "B", "answer2": "C"}
                  for part in ("train", "test")]  # fmt: skip
    stories = dump(tmp_path / "qaps.csv", rows)
    flags = ("--from", "narrativeqa", "--where", "set=test")
    assert converted(stories, *flags) == [("Who test?", ("B", "C"))]


def test_what_is_left_out_and_where_it_comes_from_is_written_down(tmp_path: Path, capsys) -> None:
    rows = [
        {"id": "1", "question": "Who?", "answer": "Bob"},
        {"id": "2", "question": "who? ", "answer": "Bob"},
        {"id": "3", "question": "Who?", "answer": "Eve"},
        {"id": "4", "question": "How?", "answer": None},
        {"id": "1", "question": "Which sign?", "answer": "$"},
        {"id": "1", "question": "Where?", "answer": "x"},
    ]
    path, out = dump(tmp_path / "dev.json", rows), tmp_path / "out.jsonl"
    main(["convert", "--from", "hotpotqa", "--in", str(path), "--out", str(out)])
    questions = load_questions(out)
    assert [question.text for question in questions] == ["Who?", "Where?"]
    assert [question.id for question in questions] == ["hotpotqa-1", hashlib.sha1(b"Where?").hexdigest()]
    assert {question.dataset for question in questions} == {"HotpotQA"}
    record = json.loads((tmp_path / "out.jsonl.source.json").read_text())
    assert record["sources"] == [{"file": "dev.json", "bytes": path.stat().st_size,
                                  "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]  # fmt: skip
    assert record["left_out"] == {
        "asked before": 1, "asked before, with other golds": 1, "no answer (a test split)": 1,
        "every gold is empty after normalisation": 1,
    }  # fmt: skip
    assert (record["rows"], record["questions"]) == (6, 2)
    printed = capsys.readouterr().out
    assert "2 questions of HotpotQA from 6 rows" in printed and "left out: 1 (asked before)" in printed


def test_the_published_columns_are_written_and_read_back(tmp_path: Path) -> None:
    path = dump(tmp_path / "train.jsonl", [{"question": "How many?", "answer": WORKED}])
    out, back = tmp_path / "out.parquet", tmp_path / "back.jsonl"
    main(["convert", "--from", "gsm8k", "--in", str(path), "--out", str(out)])
    [row] = pq.read_table(out).to_pylist()
    assert list(row) == ["data_source", "prompt", "ability", "reward_model"]
    assert row["reward_model"] == {"ground_truth": ["-1024"], "style": "rule"}
    main(["convert", "--from", "questions", "--in", str(out), "--out", str(back)])
    assert load_questions(back) == load_questions(out)


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "rows", "reason"),
    [("gsm8k", "x.jsonl", [{"question": "Q?", "answer": "no mark"}], "row 1: .*####"),
     ("hotpotqa", "x.json", [{"_id": "1", "question": "Q?", "answer": "a"}, {"_id": "2", "answer": "a"}],
      "row 2: the field question is missing"),
     ("hotpotqa", "x.json", {"error": "rate limited"}, "row 1: the field question is missing"),
     ("hotpotqa", "x.json", ('[{"question": "Q?", "answer": "a"},', '{"question'), "row 2: not JSON"),
     ("hotpotqa", "x.json", ("<html>",), "row 1: a JSON array"),
     ("hotpotqa", "x.jsonl", ('{"question": "Q?", "answer": "a"}', "[1]"), "row 2: a JSON object is wanted"),
     ("popqa", "x.tsv", [{"question": "Q?", "possible_answers": "[oops"}], "row 1: .*no JSON list"),
     ("mathqa", "x.json", [{"Problem": "Q?", "options": "a ) 1 , b ) 2", "correct": "c"}], "no text of"),
     ("squad", "x.json", {"data": [{"paragraphs": [{"qas": [{}]}]}]}, "row 1: not laid out as SQuAD"),
     ("musique", "x.jsonl", [{"question": "Q?", "answer": "a", "answer_aliases": "b"}], "row 1: .*be a list"),
     ("narrativeqa", "x.jsonl", [{"question": {"text": "Q?"}, "answers": [{}]}], "row 1: the field text"),
     ("xsum", "x.parquet", ("no parquet",), "row 1: not readable as parquet"),
     ("xsum", "x.txt", ("x",), "no raw dump"),
     ("hotpotqa", "x.json", [], "no question is left of 0 rows"),
     ("hotpotqa", "x.json", [{"question": "Q?", "answer": ""}], r"no question is left of 1 rows \(1 no")],
)  # fmt: skip
def test_a_row_that_is_not_as_the_dataset_ships_it_is_named(
    tmp_path: Path, source: str, name: str, rows, reason: str
) -> None:
    with pytest.raises(UsageError, match=rf"{name[:2]}.*{reason}"):
        converted(dump(tmp_path / name, rows), "--from", source)


def test_wrong_options_are_usage_errors(tmp_path: Path) -> None:
    path = str(dump(tmp_path / "x.json", [{"question": "Q?", "answer": "b"}]))
    begin = ["convert", "--from", "hotpotqa", "--in", path, "--out"]
    for arguments, reason in [
        ([*begin, "o.csv"], "can be written"), ([*begin, "o.jsonl", "--where", "set"], "FIELD=VALUE"),
        ([*begin, "o.jsonl", "--where", "set=train"], "field set is missing"),
        ([*begin, "o.jsonl", "--with-context"], "--from squad"),
        ([*begin, "o.jsonl", "--aliases", path], "--from 2wiki"),
        (["convert", "--from", "hotpotqa", "--in", "nowhere.json", "--out", "o.jsonl"], "no such file"),
        (["convert", "--from", "questions", "--in", path, path, "--out", "o.jsonl"], "one file"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=reason):
            main(arguments)
    assert not Path("o.jsonl").exists()
