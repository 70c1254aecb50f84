"""The audit finds what is wrong, in made files and in the published ones; the mix draws what it says."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prompt_r1.data.__main__ import main
from prompt_r1.data.audit import audit_file, overlaps, report, script_of, why_truncated
from prompt_r1.data.fields import DAPO_CLOSING, DAPO_OPENING, kind_of
from prompt_r1.data.files import load_questions, write_questions
from prompt_r1.data.mixture import TRAINED, mix
from prompt_r1.errors import UsageError
from prompt_r1.types import Question
from tests.paths import PUBLISHED

published = pytest.mark.skipif(not PUBLISHED.exists(), reason="the published test files are not here")


def jsonl(path: Path, *rows: dict[str, object] | str) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def made(count: int, dataset: str = "HotpotQA") -> list[Question]:
    kind = kind_of(dataset)
    return [Question(str(n), dataset, f"{dataset} question {n}?", ("x",), kind) for n in range(count)]


# --- Audit ----------------------------------------------------------------------------------------


def test_all_bad_rows_are_named_and_the_exit_code_says_so(tmp_path: Path, capsys) -> None:
    path = jsonl(tmp_path / "train.jsonl", {"question": "Where?", "answer": "Paris"}, "", {"question": " "},
                 "{oops", {"question": "Why?", "answers": []},
                 {"question": "Where?", "answer": "Rome"})  # fmt: skip
    audit = audit_file(path)
    assert [finding.rows for finding in audit.bad] == [(3,), (4,), (5,), (6,)]
    assert "empty text" in audit.bad[0].what and "row 1 already" in audit.bad[3].what
    with pytest.raises(SystemExit, match="1"):
        main(["audit", str(path)])
    printed = capsys.readouterr().out
    assert "train.jsonl: 1 questions (train 1)" in printed and "row 4: not JSON" in printed


def test_repeats_and_leaks_are_found_whatever_their_case_blanks_and_wrapper(tmp_path: Path, capsys) -> None:
    wrapped = f"{DAPO_OPENING}Find $x$.{DAPO_CLOSING}"
    train = jsonl(tmp_path / "train.jsonl", {"question": "Where  is it?", "answer": "here"},
                  {"question": "Find $x$.", "answer": "3"}, {"question": "where is it? ", "answer": "there"},
                  {"question": "find  $X$.", "answer": "3"})  # fmt: skip
    test = jsonl(
        tmp_path / "test.jsonl", {"question": "Who?", "answer": "me"}, {"question": wrapped, "answer": 3}
    )
    audits = [audit_file(train), audit_file(test)]
    assert [(finding.rows, "other golds" in finding.what) for finding in audits[0].duplicates] == [
        ((1, 3), True),
        ((2, 4), False),
    ]
    [(names, findings)] = overlaps(audits).items()
    assert names == (train, test) and [finding.rows for finding in findings] == [(4, 2)]
    main(["audit", "--examples", "1", str(train), str(test)])
    printed = capsys.readouterr().out
    assert "train.jsonl and test.jsonl: 1" in printed and "and 1 more" in printed


@pytest.mark.parametrize(
    ("text", "script"),
    [("Who is it?", "Latin"), ("已知 $x_{n}=7$，求 $x$ 的值。", "Chinese"), ("これは何ですか", "Japanese"),
     ("Кто это?", "Cyrillic"), ("1 + 1 = ?", "no letters"), ("누구?", "Korean"),
     ("Was heißt 日本 auf Deutsch, bitte sehr?", "Latin")],
)  # fmt: skip
def test_the_script_is_that_of_the_words_and_not_of_the_formulas(text: str, script: str) -> None:
    assert script_of(text) == script


@pytest.mark.parametrize(
    ("text", "dataset", "why"),
    [("$ Find the area of trapezoid $ABCD$", "DAPO-Math", "begins"),
     (") Find the remainder.", "DAPO-Math", "begins"),
     ("Find the minimum value of the expression:", "DAPO-Math", "ends"),
     ("In which year did the", "HotpotQA", "ends"),
     ("Find $m+n$", "DAPO-Math", "short"),
     (r"Let $\alpha be the larger root. What is its square?", "DAPO-Math", "formula"),
     (r"Let $\frac{1}{2 be the larger root$. What is its square?", "DAPO-Math", "formula"),
     ("Who?", "HotpotQA", ""),
     ("Tom has $5 and spends $2 of it, then finds $1 and lends $4. What is left?", "GSM8K", ""),
     ("(Where did the :) come from?", "HotpotQA", ""),
     ("the weight of the man of 60 years is :", "MathQA", "")],
)  # fmt: skip
def test_truncated_questions_are_guessed(text: str, dataset: str, why: str) -> None:
    found = why_truncated(Question("1", dataset, text, ("x",), kind_of(dataset)))
    assert why in found and bool(why) == bool(found)


@published
def test_the_audit_of_the_published_files() -> None:
    audits = {path.stem: audit_file(path) for path in sorted(PUBLISHED.glob("*.parquet"))}
    assert len(audits) == 12 and sum(len(audit.questions) for audit in audits.values()) == 1536
    assert not any(audit.bad for audit in audits.values())
    assert {name: len(audit.duplicates) for name, audit in audits.items() if audit.duplicates} == {
        "BookSum": 2, "DAPO-Math": 2,
    }  # fmt: skip
    empty = {name: [finding.what for finding in audit.empty_golds] for name, audit in audits.items()}
    assert {name: golds for name, golds in empty.items() if golds} == {
        "MathQA_ood": ["'a' (no other gold)"], "MusiQue": ["'$'"], "triviaqa_ood": ["'A' (no other gold)"],
    }  # fmt: skip
    assert audits["DAPO-Math"].scripts == {"Latin": 105, "Chinese": 23}
    assert {1, 19, 46} <= {row for finding in audits["DAPO-Math"].truncated for row in finding.rows}
    assert overlaps(list(audits.values())) == {}
    assert "questions in two files: 0" in report(list(audits.values()), examples=1)


@published
def test_written_parquet_is_the_published_table(tmp_path: Path) -> None:
    """Row by row; only the dataset's name is the paper's."""
    for path in PUBLISHED.glob("*.parquet"):
        write_questions(tmp_path / "again.parquet", load_questions(path))
        again, before = pq.read_table(tmp_path / "again.parquet"), pq.read_table(path)
        assert again.schema.remove_metadata() == before.schema.remove_metadata()
        assert again.drop_columns("data_source") == before.drop_columns("data_source")


# --- Mix ------------------------------------------------------------------------------------------


def test_the_mix_draws_as_many_of_each_and_says_where_there_are_fewer(tmp_path: Path, capsys) -> None:
    write_questions(tmp_path / "hotpot.jsonl", made(50))
    write_questions(tmp_path / "popqa.jsonl", made(12, "PopQA"))  # the same ids
    write_questions(tmp_path / "test.jsonl", made(5))
    flags = ["--per-dataset", "20", "--val-per-dataset", "4", "--exclude", str(tmp_path / "test.jsonl")]
    command = ["mix", "--in", str(tmp_path / "hotpot.jsonl"), str(tmp_path / "popqa.jsonl"), *flags]
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    main([*command, "--out", str(train), "--val-out", str(val)])
    printed = capsys.readouterr().out
    assert "HotpotQA: 20 + 4 of 45" in printed and "PopQA: 8 + 4 of 12 (12 fewer than asked for)" in printed
    assert "not in the mix" in printed and "GSM8K" in printed
    questions, held_out = load_questions(train), load_questions(val)
    assert len(questions) == 28 and len(held_out) == 8
    texts = {question.text for question in [*questions, *held_out]}
    assert len(texts) == 36 and not texts & {question.text for question in made(5)}
    assert [question.dataset for question in questions[:8]] != ["HotpotQA"] * 8  # shuffled
    before = train.read_bytes()
    main([*command, "--out", str(train), "--val-out", str(val)])
    assert train.read_bytes() == before
    main([*command, "--out", str(train), "--seed", "1"])
    assert train.read_bytes() != before


def asked(text: str, dataset: str = "HotpotQA") -> Question:
    return Question(f"{dataset} {text}", dataset, text, ("x",))


def test_a_question_is_drawn_once_whatever_its_case_blanks_and_dataset() -> None:
    """The first spelling stays; a test question is left out of the mix in any spelling."""
    questions = [asked("Where is it?"), asked("where  IS it? "), asked("Who?"), asked("Why?"),
                 asked("Where is it?", "PopQA"), asked("When?", "PopQA")]  # fmt: skip
    result = mix(questions, [9, 1], seed=0, exclude=[asked("who?  ", "test")])
    drawn = [question for part in result.parts for question in part]
    assert sorted(question.text for question in drawn) == ["When?", "Where is it?", "Why?"]
    assert result.available == {"HotpotQA": 2, "PopQA": 1}


def test_another_seed_draws_other_questions_in_another_order() -> None:
    def texts(size: int, seed: int) -> list[str]:
        [part] = mix(made(40), [size], seed=seed).parts
        return [question.text for question in part]

    assert texts(20, 0) == texts(20, 0)
    assert set(texts(20, 0)) != set(texts(20, 1))
    assert texts(40, 0) != texts(40, 1) and sorted(texts(40, 0)) == sorted(texts(40, 1))
    assert texts(40, 0) != [question.text for question in made(40)]


def test_the_parts_of_a_mix_are_shuffled_over_the_datasets() -> None:
    for seed in (0, 1):
        [part] = mix([*made(30), *made(30, "PopQA")], [30], seed=seed).parts
        datasets = [question.dataset for question in part]
        assert datasets != sorted(datasets) and {*datasets[:15]} == {"HotpotQA", "PopQA"}


def test_the_papers_mix_is_5120_of_each_of_eight() -> None:
    result = mix([q for name in TRAINED for q in made(5_200, name)], [5_120], seed=0)
    assert len(result.parts[0]) == 40_960 == len({question.id for question in result.parts[0]})
    assert result.drawn == {name: [5_120] for name in TRAINED}


def test_a_mix_over_its_own_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hotpot.jsonl"
    write_questions(path, made(3))
    with pytest.raises(UsageError, match="must not be among"):
        main(["mix", "--in", str(path), "--out", str(path)])
    with pytest.raises(UsageError, match="at least 1"):
        main(["mix", "--in", str(path), "--out", str(tmp_path / "o.jsonl"), "--per-dataset", "0"])
