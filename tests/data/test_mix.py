"""The mix draws the promised numbers of questions, and no question twice."""

from pathlib import Path

import pytest

from prompt_r1.data.__main__ import main
from prompt_r1.data.datasets import mix
from prompt_r1.data.files import load_questions, write_questions
from prompt_r1.errors import UsageError
from prompt_r1.types import Question


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
    printed = capsys.readouterr().out
    assert "HotpotQA: 20\n" in printed and "PopQA: 12\n" in printed and "GSM8K: 0\n" in printed
    texts = {question.text for question in questions}
    assert len(questions) == len(texts) == 32
    assert not texts & {question.text for question in numbered_questions(5)}
    assert [question.dataset for question in questions[:8]] != ["HotpotQA"] * 8  # shuffled
    assert drawn() == questions
    other = drawn("--seed", "1")
    assert {question.text for question in other} != texts


def test_a_question_is_drawn_once_despite_differences_in_case_blanks_and_dataset() -> None:
    """The first spelling is kept; a test question is left out in every spelling."""
    hotpot, popqa = ("Where is it?", "where  IS it? ", "Who?", "Why?"), ("Where is it?", "When?")
    questions = [Question(text, "HotpotQA", text, ("x",)) for text in hotpot]
    questions += [Question(text, "PopQA", text, ("x",)) for text in popqa]
    drawn = mix(questions, 9, seed=0, exclude=[Question("1", "test", "who?  ", ("x",))])
    assert sorted(question.text for question in drawn) == ["When?", "Where is it?", "Why?"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("mix --in own.jsonl --out own.jsonl", "must not be among"),
        ("mix --in own.jsonl --out o.jsonl --per-dataset 0", "--per-dataset must be above 0 and below"),
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
    with pytest.raises(UsageError, match=r"only \.jsonl files"):
        write_questions(tmp_path / "mix.csv", load_questions(path))
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable() and r"\x1b[2J\u202etowns" in printed
