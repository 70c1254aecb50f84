"""One command builds the paper's files from raw dumps, and says what is missing."""

import csv
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prompt_r1.data.__main__ import main
from prompt_r1.data.fields import question_key
from prompt_r1.data.files import load_questions
from prompt_r1.data.mixture import PAPER_DATASETS
from prompt_r1.data.sources import SOURCES, TEST_FILES
from prompt_r1.errors import UsageError
from tests.paths import PUBLISHED, ROOT

ROWS = 160  # of each dump: 128 test questions, and some to train on
Rows = list[dict[str, object]]


def plain(name: str) -> Rows:
    return [{"_id": f"{n}", "question": f"What is {name} {n}?", "answer": f"x{n}"} for n in range(ROWS)]


DUMPS: dict[str, Rows] = {
    "2wiki": plain("2wiki"),
    "hotpotqa": plain("hotpotqa"),
    "gsm8k": [{"question": f"Anna has {n} pens?", "answer": f"So\n#### {n}"} for n in range(ROWS)],
    "dapo": [
        {
            "prompt": [{"role": "user", "content": f"Find ${n}x$."}],
            "reward_model": {"ground_truth": f"{n}", "style": "rule"},
        }
        for n in range(ROWS)
    ],
    "musique": [
        {**row, "id": row["_id"], "answer_aliases": ["y"], "answerable": True} for row in plain("musique")
    ],
    "popqa": [
        {"id": n, "question": f"Who is {n}?", "possible_answers": json.dumps([f"z{n}"])} for n in range(ROWS)
    ],
    "booksum": [{"book_id": f"Book.chapter {n}", "summary_text": f"Summary {n}"} for n in range(ROWS)],
    "mathqa": [
        {"Problem": f"what is {n} ?", "options": "a ) 1 , b ) 2", "correct": "b"} for n in range(ROWS)
    ],
    "squad": [
        {"id": f"{n}", "question": f"Where is {n}?", "answers": {"text": ["there"], "answer_start": [0]}}
        for n in range(ROWS)
    ],
    "triviaqa": [
        {"QuestionId": f"{n}", "Question": f"Trivia {n}?", "Answer": {"Value": "v", "Aliases": []}}
        for n in range(ROWS)
    ],
    "xsum": [{"id": f"{n}", "document": f"Document {n}", "summary": f"Summary {n}"} for n in range(ROWS)],
    "narrativeqa": [
        {"set": "test", "question": f"Story {n}?", "answer1": "a1", "answer2": "b1"} for n in range(ROWS)
    ],
}  # fmt: skip


def write_dump(path: Path, rows: Rows) -> None:
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".csv" | ".tsv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A small dump of every dataset under the names of the published files."""
    folder = tmp_path / "raw"
    for source in SOURCES:
        (folder / source.name).mkdir(parents=True)
        if source.name == "writingprompts":
            for name, text in (("source", "[ WP ] Prompt"), ("target", "A story")):
                lines = [f"{text} {n}" for n in range(ROWS)]
                (folder / source.name / f"train.wp_{name}").write_text("\n".join(lines) + "\n")
        else:
            write_dump(folder / source.name / source.files[0], DUMPS[source.name])
    return folder


def build(raw: Path, out: Path, *flags: str) -> None:
    main(
        [
            "paper",
            "--raw",
            str(raw),
            "--out",
            str(out),
            "--per-dataset",
            "8",
            "--val-per-dataset",
            "2",
            *flags,
        ]
    )


def test_one_command_builds_the_mix_the_validation_set_and_the_test_files(raw: Path, tmp_path: Path, capsys):
    build(raw, tmp_path / "out")
    printed = capsys.readouterr().out
    train, validation = (
        load_questions(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "validation")
    )
    for part, size in ((train, 8), (validation, 2)):
        assert Counter(question.dataset for question in part) == dict.fromkeys(PAPER_DATASETS, size)
    tests = [load_questions(path) for path in (tmp_path / "out" / "test").iterdir()]
    assert len(tests) == 12 and all(len(questions) == 128 for questions in tests)
    parts = [train, validation, *tests]
    keys = [question_key(question.text) for part in parts for question in part]
    assert len(set(keys)) == len(keys), "a question is in two files"
    assert "questions in two files: 0" in printed and "missing: 12 test files were drawn" in printed
    assert "found, but with another sum" in printed  # gsm8k/train.jsonl is not the published file


def test_the_seed_determines_all_files(raw: Path, tmp_path: Path, capsys):
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        build(raw, tmp_path / name, "--seed", seed)
    files = ["train.jsonl", "validation.jsonl", "test/GSM8K.jsonl"]
    a, b, c = ([(tmp_path / name / file).read_bytes() for file in files] for name in "abc")
    assert a == b and all(one != other for one, other in zip(a, c, strict=True))


def test_everything_that_is_missing_is_named_in_one_table_with_its_address(tmp_path: Path, capsys):
    (tmp_path / "raw").mkdir()
    with pytest.raises(SystemExit, match="1"):
        build(tmp_path / "raw", tmp_path / "out")
    printed = capsys.readouterr().out
    for source in SOURCES:
        assert f"missing: {source.name}/{source.files[0]}" in printed
        assert source.address in printed and source.sha256 in printed
    assert "13 datasets are missing" in printed


def test_without_the_folder_of_the_dumps_nothing_is_written(tmp_path: Path):
    with pytest.raises(UsageError, match="no such folder"):
        build(tmp_path / "raw", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published test files are absent")
def test_the_published_test_files_are_recognised(raw: Path, tmp_path: Path, capsys):
    (raw / "eval_data").symlink_to(PUBLISHED)
    build(raw, tmp_path / "out")
    assert "found, 12 of 12 sums as published" in capsys.readouterr().out
    assert not (tmp_path / "out" / "test").exists() and len(TEST_FILES) == 12


def test_the_documentation_has_every_address_size_and_sum():
    text = (ROOT / "docs" / "data.md").read_text("utf-8")
    for source in SOURCES:
        assert source.address in text and source.sha256 in text and source.licence in text
        assert not source.bytes or f"{source.bytes:,}" in text
