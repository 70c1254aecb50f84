"""The file of answers: what is found again, what is asked again; and comparisons of two such files."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction, PredictionFile, read_predictions
from prompt_r1.evaluation.results_folder import compare_files
from prompt_r1.types import Question

QUESTION = Question("q1", "towns", "Where?", ("Paris", "P."))


def answer(number: int = 1, text: str | None = "Paris", **others: object) -> Prediction:
    fields = {"method": "direct", "environment": "large", "agent": "", "setting": "s", "dataset": "towns",
              "kind": "qa", "id": f"q{number}", "sample": 0, "question": "Where?", "answers": ("Paris", "P."),
              "prediction": text}  # fmt: skip
    return Prediction(**{**fields, **others})  # type: ignore[arg-type]


def write(path: Path, *predictions: Prediction) -> str:
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in predictions))
    return str(path)


def test_a_kill_costs_the_torn_line_only(tmp_path):
    path = tmp_path / "predictions.jsonl"
    file = PredictionFile(path)
    file.add(answer(1), em=1.0)
    file.add(answer(2))
    file.close()
    path.write_bytes(path.read_bytes()[:-9])
    again = PredictionFile(path)
    assert again.find("s", QUESTION, 0) == answer(1)
    assert again.find("s", Question("q2", "towns", "Where?", ("Paris", "P.")), 0) is None
    again.add(answer(2))
    again.close()
    assert read_predictions(path) == [answer(1), answer(2)]


@pytest.mark.parametrize(
    "other",
    [
        answer(error="HTTP 500"),
        answer(setting="t"),
        answer(sample=1),
        answer(question="Where is it?"),
        answer(answers=("Paris",)),
    ],
)
def test_what_failed_or_was_asked_otherwise_is_asked_again(tmp_path, other):
    path = tmp_path / "predictions.jsonl"
    write(path, other)
    file = PredictionFile(path)
    assert file.find("s", QUESTION, 0) is None
    file.add(answer())
    assert file.find("s", QUESTION, 0) == answer()
    file.close()


def test_two_evaluations_do_not_write_one_file(tmp_path):
    first = PredictionFile(tmp_path / "predictions.jsonl")
    with pytest.raises(UsageError, match="another evaluation writes there"):
        PredictionFile(tmp_path / "predictions.jsonl")
    first.close()
    PredictionFile(tmp_path / "predictions.jsonl").close()


def test_runs_on_other_questions_are_not_compared(tmp_path):
    first = write(tmp_path / "a.jsonl", answer(1), answer(2), answer(3))
    second = write(tmp_path / "b.jsonl", answer(1))
    with pytest.raises(UsageError, match=r"b\.jsonl has no answer to question 'q2' of towns and 1 more"):
        compare_files(first, second)
    with pytest.raises(UsageError, match=r"b\.jsonl has no answer"):
        compare_files(second, first)
    changed = write(tmp_path / "c.jsonl", answer(1, answers=("Lyon",)))
    with pytest.raises(UsageError, match=r"other words or gold answers in .*c\.jsonl"):
        compare_files(second, changed)


def test_of_a_file_with_several_systems_one_is_chosen_by_name(tmp_path):
    played = [answer(n, method="prompt-r1", agent="runs/a", setting="p") for n in range(9)]
    asked = [answer(n, "Lyon") for n in range(9)]
    path = write(tmp_path / "both.jsonl", *played, *asked)
    with pytest.raises(
        UsageError, match=r"names 2 systems; choose one of .*both.jsonl:prompt-r1:large:runs/a, "
    ):
        compare_files(path, path)
    text = compare_files(f"{path}:prompt-r1", f"{path}:direct:large")
    # Nine of nine: McNemar's exact p is 2 / 2^9.
    assert "| towns | EM | 9 | 100.0 | 0.0 | +100.0 [" in text and "| McNemar | 0.004 | 0.004 |" in text


def test_questions_whose_call_failed_are_left_out_of_the_pairs_and_told(tmp_path):
    good = [answer(n) for n in range(8)]
    first = write(tmp_path / "a.jsonl", *good, answer(8))
    second = write(tmp_path / "b.jsonl", *good, answer(8, None, error="HTTP 500"))
    assert "| towns | EM | 8 (1 lost) | 100.0 | 100.0 | +0.0 [" in compare_files(first, second)
