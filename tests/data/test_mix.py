"""The mix draws the promised numbers of questions, and no question twice."""

from pathlib import Path

import pytest

from prompt_r1.data.__main__ import main
from prompt_r1.data.convert import mix
from prompt_r1.data.datasets import PAPER_MIX
from prompt_r1.data.files import load_questions, write_questions
from prompt_r1.errors import UsageError
from prompt_r1.types import Question


def numbered_questions(count: int, dataset: str = "HotpotQA") -> list[Question]:
    return [Question(str(n), dataset, f"{dataset} question {n}?", ("x",)) for n in range(count)]


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
    assert "HotpotQA: 20 + 4\n" in printed and "PopQA: 8 + 4 (12 fewer than requested)" in printed
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
    parts = mix(questions, [9, 1], seed=0, exclude=[Question("1", "test", "who?  ", ("x",))])
    drawn = [question.text for part in parts for question in part]
    assert sorted(drawn) == ["When?", "Where is it?", "Why?"]


def test_another_seed_draws_different_questions_in_a_different_order() -> None:
    def texts(size: int, seed: int) -> list[str]:
        [part] = mix(numbered_questions(40), [size], seed=seed)
        return [question.text for question in part]

    assert texts(20, 0) == texts(20, 0)
    assert set(texts(20, 0)) != set(texts(20, 1))
    assert texts(40, 0) != texts(40, 1) and sorted(texts(40, 0)) == sorted(texts(40, 1))


def test_the_papers_mix_has_5120_questions_of_each_of_eight_datasets() -> None:
    questions = [question for name in PAPER_MIX for question in numbered_questions(5_200, name)]
    [part] = mix(questions, [5_120], seed=0)
    assert len(part) == 40_960 == len({question.id for question in part})
    assert {question.dataset for question in part[:100]} == set(PAPER_MIX)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("mix --in own.jsonl --out own.jsonl", "must not be among"),
        ("mix --in own.jsonl --out o.parquet", "only .jsonl files can be written"),
        ("mix --in own.jsonl --out o.jsonl --per-dataset 0", "--per-dataset must be above 0 and below"),
        ("convert --from hotpotqa --in nowhere.json --out o.jsonl", "no such file"),
        ("convert --from hotpotqa --in own.jsonl --out o.csv", "only .jsonl files can be written"),
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
