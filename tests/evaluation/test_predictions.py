"""The file of predictions: which answers are found again and which are asked again; comparisons of files."""

import json
import re
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import score_predictions
from prompt_r1.evaluation.comparison import compare_files
from prompt_r1.evaluation.predictions import Prediction, PredictionFile, System, read_predictions, to_row
from prompt_r1.spending import Spending
from tests.evaluation.predictions import predict, question_of


def write(path: Path, *predictions: Prediction) -> str:
    path.write_text("".join(json.dumps(to_row(one)) + "\n" for one in predictions))
    return str(path)


def test_a_line_is_one_flat_object_that_can_be_read_again(tmp_path):
    """The keys are an interface: other programs read predictions.jsonl."""
    prediction = Prediction(
        question_of(answers=("3",), kind="math"),
        "3",
        "dialogue",
        sample=1,
        stop="answered",
        turns=2,
        spent=Spending(1, 10, 3, 0.5),
        format=1.0,
        reward=0.9,
        system=System("prompt-r1", "large", "runs/a"),
        setting="s",
    )
    assert to_row(prediction) == {
        "method": "prompt-r1", "environment": "large", "agent": "runs/a", "setting": "s", "dataset": "towns",
        "kind": "math", "id": "q1", "sample": 1, "question": "Where?", "answers": ("3",), "prediction": "3",
        "raw": "dialogue", "stop": "answered", "error": "", "turns": 2, "calls": 1, "tokens_in": 10,
        "tokens_out": 3, "usd": 0.5, "format": 1.0, "reward": 0.9,
    }  # fmt: skip
    write(tmp_path / "predictions.jsonl", prediction)
    assert read_predictions(tmp_path / "predictions.jsonl") == [prediction]


def test_a_kill_loses_only_the_incomplete_line(tmp_path):
    path = tmp_path / "predictions.jsonl"
    file = PredictionFile(path)
    file.add(predict(1))
    file.add(predict(2))
    file.close()
    path.write_bytes(path.read_bytes()[:-9])
    again = PredictionFile(path)
    assert again.find("s", question_of(1), 0) == predict(1)
    assert again.find("s", question_of(2), 0) is None
    again.add(predict(2))
    again.close()
    assert read_predictions(path) == [predict(1), predict(2)]


@pytest.mark.parametrize(
    "other",
    [
        predict(error="HTTP 500"),
        predict(setting="t"),
        predict(sample=1),
        predict(question=question_of(text="Where is it?")),
        predict(question=question_of(answers=("Paris",))),
    ],
)
def test_a_failed_answer_or_one_to_another_question_is_asked_again(tmp_path, other):
    path = tmp_path / "predictions.jsonl"
    write(path, other)
    file = PredictionFile(path)
    assert file.find("s", question_of(), 0) is None
    file.add(predict())
    assert file.find("s", question_of(), 0) == predict()
    file.close()


def test_two_evaluations_cannot_write_the_same_file(tmp_path):
    first = PredictionFile(tmp_path / "predictions.jsonl")
    with pytest.raises(UsageError, match="another evaluation is writing to this file"):
        PredictionFile(tmp_path / "predictions.jsonl")
    first.close()
    PredictionFile(tmp_path / "predictions.jsonl").close()


def test_runs_on_different_questions_are_not_compared(tmp_path):
    three = write(tmp_path / "a.jsonl", predict(1), predict(2), predict(3))
    two = write(tmp_path / "b.jsonl", predict(1), predict(2))
    one = write(tmp_path / "c.jsonl", predict(1))
    with pytest.raises(UsageError, match=r"b\.jsonl has no answer to question 'q3' of towns: only runs"):
        compare_files(three, two)
    for sides in ((three, one), (one, three)):
        with pytest.raises(UsageError, match=r"c\.jsonl has no answer to question 'q2' of towns and 1 more"):
            compare_files(*sides)
    for question in (question_of(text="Who?"), question_of(answers=("Lyon",))):
        changed = write(tmp_path / "d.jsonl", predict(question=question))
        with pytest.raises(UsageError, match=r"a different text or gold answers in .*d\.jsonl"):
            compare_files(one, changed)


def test_a_system_in_a_file_of_several_is_selected_by_name(tmp_path):
    agent = System("prompt-r1", "large", "runs/a")
    played = [predict(number, system=agent, setting="p") for number in range(9)]
    asked = [predict(number, "Lyon") for number in range(9)]
    path = write(tmp_path / "both.jsonl", *played, *asked)
    with pytest.raises(UsageError, match=r"names 2 systems; choose one of .*:prompt-r1:large:runs/a, "):
        compare_files(path, path)
    text = compare_files(f"{path}:prompt-r1", f"{path}:direct:large")
    # Nine wins of nine: McNemar's exact p is 2 / 2^9.
    assert re.search(r"^EM +n +A +B .*\ntowns +9  100.0  0.0  \+100.0 \[", text, re.M)
    assert "  0.004  significant\n" in text and "McNemar" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_comparison_leaves_out_and_counts_questions_whose_call_failed(tmp_path):
    good = [predict(number) for number in range(8)]
    first = write(tmp_path / "a.jsonl", *good, predict(8))
    second = write(tmp_path / "b.jsonl", *good, predict(8, None, error="HTTP 500"))
    text = compare_files(first, second)
    assert "8 (1 failed)  100.0  100.0  +0.0 [" in text and max(map(len, text.splitlines())) <= 80
    assert "\nown " not in text

    def length(prediction, question):
        return len(prediction) / 10

    text = compare_files(first, second, score=partial(score_predictions, own=length))
    assert re.search(r"^own +n .*\ntowns +8 \(1 failed\)  50.0  50.0", text, re.M)


@pytest.mark.parametrize(
    "damage",
    [
        {"id": ["q1"]}, {"dataset": 7}, {"answers": "Paris"}, {"answers": [7]}, {"kind": []},
        {"prediction": 7}, {"calls": "two"}, {"usd": float("inf")}, {"reward": float("nan")},
        {"setting": {}}, {"agent": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_line_with_a_field_of_another_type_is_asked_again(damage, tmp_path):
    """The file may have been edited, and a wrong type would end the evaluation in the tables."""
    path = tmp_path / "predictions.jsonl"
    path.write_text(json.dumps({**to_row(predict()), **damage}) + "\n" + "[" * 100_000 + "\n[]\n7\n")
    with closing(PredictionFile(path)) as file:
        assert file.find("s", question_of(), 0) is None
    with pytest.raises(UsageError, match="holds no predictions"):
        read_predictions(path)
