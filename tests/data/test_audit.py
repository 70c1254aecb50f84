"""The audit finds problems in question files, and the mix draws the promised numbers of questions."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prompt_r1.data.__main__ import main
from prompt_r1.data.audit import _excerpt, audit_file, audit_report, shared_questions
from prompt_r1.data.datasets import PAPER_MIX
from prompt_r1.data.files import DAPO_CLOSING, DAPO_OPENING, kind_of, load_questions, write_questions
from prompt_r1.data.mixture import mix
from prompt_r1.errors import UsageError
from prompt_r1.types import Question
from tests.support.paths import PUBLISHED

published = pytest.mark.skipif(not PUBLISHED.exists(), reason="the published test files are absent")


def jsonl(path: Path, *rows: dict[str, object] | str) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def numbered_questions(count: int, dataset: str = "HotpotQA") -> list[Question]:
    kind = kind_of(dataset)
    return [Question(str(n), dataset, f"{dataset} question {n}?", ("x",), kind) for n in range(count)]


# --- Audit ----------------------------------------------------------------------------------------


def test_the_audit_lists_all_bad_rows_and_exits_with_code_1(tmp_path: Path, capsys) -> None:
    path = jsonl(
        tmp_path / "train.jsonl",
        {"question": "Where?", "answer": "Paris"},
        "",
        {"question": " ", "answer": "x"},
        "{oops",
        {"question": "Why?", "answers": []},
        {"question": "When?", "answer": "Now", "id": "n"},
        {"question": "Who?", "answer": "Anna", "id": "n"},
    )
    audit = audit_file(path)
    assert [finding.rows for finding in audit.bad] == [(3,), (4,), (5,), (7,)]
    assert "empty text" in audit.bad[0].what and "row 6 already" in audit.bad[3].what
    with pytest.raises(SystemExit, match="1"):
        main(["audit", str(path)])
    printed = capsys.readouterr().out
    assert "train.jsonl: 2 questions (train 2)" in printed and "row 4: not JSON" in printed


def test_repeats_and_leaks_are_found_despite_differences_in_case_blanks_and_wrapper(
    tmp_path: Path, capsys
) -> None:
    wrapped = f"{DAPO_OPENING}Find $x$.{DAPO_CLOSING}"
    train = jsonl(
        tmp_path / "train.jsonl",
        {"question": "Where  is it?", "answer": "here"},
        {"question": "Find $x$.", "answer": "3"},
        {"question": "where is it? ", "answer": "there"},
        {"question": "find  $X$.", "answer": "3"},
    )
    other = {"question": "Who?", "answer": "me"}
    test = jsonl(tmp_path / "test.jsonl", other, {"question": wrapped, "answer": 3})
    audits = [audit_file(train), audit_file(test)]
    repeats = [(finding.rows, "different golds" in finding.what) for finding in audits[0].duplicates]
    assert repeats == [((1, 3), True), ((2, 4), False)]
    assert [finding.rows for finding in shared_questions(*audits)] == [(4, 2)]
    main(["audit", "--examples", "1", str(train), str(test)])
    printed = capsys.readouterr().out
    assert "train.jsonl and test.jsonl: 1" in printed and "and 1 more" in printed


def test_the_whole_report_of_two_files(tmp_path: Path) -> None:
    """Row numbers count from 1; two files of 7 and 1 questions, of which one is in both."""
    long = "A" * 60 + "b" * 6 + "c" * 15
    questions = ["Who is it?", "Who  is it?", "Is it the", long, "Кто?", "WHO IS IT?", "One?"]
    golds = [["x"], ["y"], ["xx"], ["x"], ["the", "..."], ["x"], ["the"]]
    rows = [
        {"question": text, "answers": answers, "id": str(number)}
        for number, (text, answers) in enumerate(zip(questions, golds, strict=True))
    ]
    first = jsonl(tmp_path / "one.jsonl", *rows, {"question": "No gold?"})
    second = jsonl(tmp_path / "two.jsonl", {"question": "one?", "answer": "x"})
    audits = [audit_file(first), audit_file(second)]
    assert audit_report(audits, examples=1).splitlines() == [
        f"{first}: 7 questions (one 7)",
        "  characters per question: 4 | 10 | 59 | 81 (minimum | median | 95 % | maximum)",
        "  characters per gold: 1 | 1 | 3 | 3 (minimum | median | 95 % | maximum)",
        "  golds per question: 1 | 1 | 1 | 2 (minimum | median | 95 % | maximum)",
        "  bad rows: 1",
        "    row 8: " + audits[0].bad[0].what,
        "  repeated questions: 1",
        "    rows 1, 2, 6: 'Who is it?', with different golds",
        "  golds empty after normalisation: 2",
        "    row 5: 'the', '...' (no other gold)",
        "    and 1 more (--examples)",
        "",
        *audit_report(audits[1:], examples=0).splitlines(),
        "",
        "questions in two files: 1",
        "  one.jsonl and two.jsonl: 1",
        "    rows 7, 1: 'One?'",
    ]
    none = jsonl(tmp_path / "none.jsonl", "{")
    report = audit_report([audit_file(none)], examples=0)
    assert report.startswith(f"{none}: 0 questions (none)\n  bad rows: 1\n")


def test_questions_that_name_no_dataset_are_counted(tmp_path: Path) -> None:
    """Every row of the published training and validation files says hotpotqa/hotpot_qa."""
    row = {"question": "Where?", "answer": "Paris", "data_source": "hotpotqa/hotpot_qa"}
    path = jsonl(tmp_path / "train.jsonl", row, {"question": "Why?", "answer": "Rain"})
    report = audit_report([audit_file(path)], examples=0)
    assert "questions without a dataset, scored as short answers: 1" in report


def test_a_long_question_is_shown_by_its_ends() -> None:
    assert _excerpt("x" * 80) == repr("x" * 80)
    assert _excerpt("a" * 60 + "b" * 6 + "c" * 15) == repr("a" * 60 + " … " + "c" * 15)


@published
def test_the_audit_of_the_published_files_finds_what_the_manual_says() -> None:
    audits = {path.stem: audit_file(path) for path in sorted(PUBLISHED.glob("*.parquet"))}
    assert len(audits) == 12 and sum(len(audit.questions) for audit in audits.values()) == 1536
    assert not any(audit.bad for audit in audits.values())
    repeats = {name: len(audit.duplicates) for name, audit in audits.items() if audit.duplicates}
    assert repeats == {"BookSum": 2, "DAPO-Math": 2}
    empty = {name: [finding.what for finding in audit.empty_golds] for name, audit in audits.items()}
    assert {name: golds for name, golds in empty.items() if golds} == {
        "MathQA_ood": ["'a' (no other gold)"],
        "MusiQue": ["'$'"],
        "triviaqa_ood": ["'A' (no other gold)"],
    }
    assert "questions in two files: 0" in audit_report(list(audits.values()), examples=1)


@published
def test_a_published_file_that_is_read_and_written_again_is_unchanged(tmp_path: Path) -> None:
    """Only the dataset's name changes, to that of the paper."""
    for path in PUBLISHED.glob("*.parquet"):
        write_questions(tmp_path / "again.parquet", load_questions(path))
        again, before = pq.read_table(tmp_path / "again.parquet"), pq.read_table(path)
        assert again.schema.remove_metadata() == before.schema.remove_metadata()
        assert again.drop_columns("data_source") == before.drop_columns("data_source")


# --- Mix ------------------------------------------------------------------------------------------


def test_the_mix_draws_equally_many_of_each_dataset_and_reports_where_there_are_fewer(
    tmp_path: Path, capsys
) -> None:
    write_questions(tmp_path / "hotpot.jsonl", numbered_questions(50))
    write_questions(tmp_path / "popqa.jsonl", numbered_questions(12, "PopQA"))  # the same ids
    write_questions(tmp_path / "test.jsonl", numbered_questions(5))
    flags = ["--per-dataset", "20", "--val-per-dataset", "4", "--exclude", str(tmp_path / "test.jsonl")]
    command = ["mix", "--in", str(tmp_path / "hotpot.jsonl"), str(tmp_path / "popqa.jsonl"), *flags]
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    main([*command, "--out", str(train), "--val-out", str(val)])
    printed = capsys.readouterr().out
    assert "HotpotQA: 20 + 4 of 45" in printed and "PopQA: 8 + 4 of 12 (12 fewer than requested)" in printed
    assert "are missing" in printed and "GSM8K" in printed
    questions, held_out = load_questions(train), load_questions(val)
    assert len(questions) == 28 and len(held_out) == 8
    texts = {question.text for question in [*questions, *held_out]}
    assert len(texts) == 36 and not texts & {question.text for question in numbered_questions(5)}
    assert [question.dataset for question in questions[:8]] != ["HotpotQA"] * 8  # shuffled
    before = train.read_bytes()
    main([*command, "--out", str(train), "--val-out", str(val)])
    assert train.read_bytes() == before
    main([*command, "--out", str(train), "--seed", "1"])
    assert train.read_bytes() != before


def test_a_question_is_drawn_once_despite_differences_in_case_blanks_and_dataset() -> None:
    """The first spelling is kept; a test question is left out in every spelling."""
    hotpot, popqa = ("Where is it?", "where  IS it? ", "Who?", "Why?"), ("Where is it?", "When?")
    questions = [Question(text, "HotpotQA", text, ("x",)) for text in hotpot]
    questions += [Question(text, "PopQA", text, ("x",)) for text in popqa]
    result = mix(questions, [9, 1], seed=0, exclude=[Question("1", "test", "who?  ", ("x",))])
    drawn = [question for part in result.parts for question in part]
    assert sorted(question.text for question in drawn) == ["When?", "Where is it?", "Why?"]
    assert result.available == {"HotpotQA": 2, "PopQA": 1}


def test_another_seed_draws_different_questions_in_a_different_order() -> None:
    def texts(size: int, seed: int) -> list[str]:
        [part] = mix(numbered_questions(40), [size], seed=seed).parts
        return [question.text for question in part]

    assert texts(20, 0) == texts(20, 0)
    assert set(texts(20, 0)) != set(texts(20, 1))
    assert texts(40, 0) != texts(40, 1) and sorted(texts(40, 0)) == sorted(texts(40, 1))
    assert texts(40, 0) != [question.text for question in numbered_questions(40)]


def test_the_datasets_are_shuffled_together_in_each_part_of_a_mix() -> None:
    for seed in (0, 1):
        [part] = mix([*numbered_questions(30), *numbered_questions(30, "PopQA")], [30], seed=seed).parts
        datasets = [question.dataset for question in part]
        assert datasets != sorted(datasets) and {*datasets[:15]} == {"HotpotQA", "PopQA"}


def test_the_papers_mix_has_5120_questions_of_each_of_eight_datasets() -> None:
    questions = [question for name in PAPER_MIX for question in numbered_questions(5_200, name)]
    result = mix(questions, [5_120], seed=0)
    assert len(result.parts[0]) == 40_960 == len({question.id for question in result.parts[0]})
    assert result.drawn == {name: [5_120] for name in PAPER_MIX}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("mix --in own.jsonl --out own.jsonl", "must not be among"),
        ("mix --in own.jsonl --out o.jsonl --per-dataset 0", "--per-dataset must be above 0, not 0"),
        ("audit own.jsonl --examples -1", "--examples must be 0"),
    ],
)
def test_values_that_do_not_fit_are_usage_errors(line: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        main(line.split())


def test_the_name_of_a_dataset_cannot_clear_the_terminal(tmp_path: Path, capsys) -> None:
    path = tmp_path / "hostile.jsonl"
    write_questions(path, numbered_questions(3, "\x1b[2J\u202etowns"))
    main(["audit", str(path)])
    main(["mix", "--in", str(path), "--out", str(tmp_path / "mix.jsonl"), "--per-dataset", "2"])
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable() and printed.count(r"\x1b[2J\u202etowns") == 2
