"""The file of predictions: which answers are found again and which are asked again."""

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import (
    Prediction,
    PredictionFile,
    System,
    read_predictions,
    short_names,
    to_row,
)
from prompt_r1.spending import Spending
from tests.support.predictions import DIRECT, predict, question_of


def write(path: Path, *predictions: Prediction) -> None:
    path.write_text("".join(json.dumps(to_row(one)) + "\n" for one in predictions))


def test_a_line_is_one_flat_object_that_can_be_read_again(tmp_path):
    """The keys are an interface: other programs read predictions.jsonl."""
    prediction = Prediction(
        System("prompt-r1", "large", "runs/a"),
        question_of(answers=("3",), kind="math"),
        1,
        "3",
        "dialogue",
        stop="answered",
        turns=2,
        spent=Spending(1, 10, 3, 0.5),
        format=1.0,
        reward=0.9,
    )
    assert to_row(prediction) == {
        "method": "prompt-r1", "environment": "large", "agent": "runs/a", "dataset": "towns",
        "kind": "math", "id": "q1", "sample": 1, "question": "Where?", "answers": ("3",), "prediction": "3",
        "raw": "dialogue", "stop": "answered", "error": "", "turns": 2, "calls": 1, "tokens_in": 10,
        "tokens_out": 3, "usd": 0.5, "format": 1.0, "reward": 0.9,
    }  # fmt: skip
    write(tmp_path / "predictions.jsonl", prediction)
    assert read_predictions(tmp_path / "predictions.jsonl") == [prediction]


def test_a_kill_loses_only_the_incomplete_line(tmp_path, caplog):
    path = tmp_path / "predictions.jsonl"
    with closing(PredictionFile(path)) as file:
        file.add(predict(1))
        file.add(predict(2))
    path.write_bytes(path.read_bytes()[:-9] + b'\n{"id": [')
    with closing(PredictionFile(path)) as again:
        assert again.find(DIRECT, question_of(1), 0) == predict(1)
        assert again.find(DIRECT, question_of(2), 0) is None
        again.add(predict(2, error="HTTP 500"))
        again.add(predict(2))
    assert read_predictions(path) == [predict(1), predict(2)], "of several lines the last one counts"
    assert "2 damaged lines" in caplog.text, "nothing is dropped silently"


def test_a_disk_that_is_full_for_a_moment_loses_no_answer(tmp_path, monkeypatch):
    """`os.write` wrote half a line and raised nothing; the next answer was glued to it: both were lost."""
    path = tmp_path / "predictions.jsonl"
    write_all = os.write
    with closing(PredictionFile(path)) as file, monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, content: write_all(file, content[:50]))
        file.add(predict(1))
        file.add(predict(2))
    assert read_predictions(path) == [predict(1), predict(2)]


@pytest.mark.parametrize(
    "other",
    [
        predict(error="HTTP 500"),
        predict(system=System("cot", "large")),
        predict(sample=1),
        predict(question=question_of(text="Where is it?")),
        predict(question=question_of(answers=("Paris",))),
    ],
)
def test_a_failed_answer_or_one_to_another_question_is_asked_again(tmp_path, other):
    path = tmp_path / "predictions.jsonl"
    write(path, other)
    with closing(PredictionFile(path)) as file:
        assert file.find(DIRECT, question_of(), 0) is None
        file.add(predict())
        assert file.find(DIRECT, question_of(), 0) == predict()


def test_a_stored_answer_is_scored_as_the_question_is_now(tmp_path):
    """A corrected kind was ignored: a long text was still scored as a short answer."""
    now = replace(predict().question, kind="text")
    with closing(PredictionFile(tmp_path / "predictions.jsonl")) as file:
        file.add(predict())
        assert file.find(DIRECT, now, 0)
        [found] = file.answers_to([(now, 0)], first=[DIRECT])
    assert found.question.kind == "text"


def test_two_evaluations_cannot_write_the_same_file(tmp_path):
    first = PredictionFile(tmp_path / "predictions.jsonl")
    with pytest.raises(UsageError, match=r"predictions.jsonl.*another evaluation"):
        PredictionFile(tmp_path / "predictions.jsonl")
    first.close()
    PredictionFile(tmp_path / "predictions.jsonl").close()


def test_a_file_that_another_evaluation_holds_is_not_left_open(tmp_path):
    """A program that tries again for hours would run out of file descriptors."""
    path = tmp_path / "predictions.jsonl"
    with closing(PredictionFile(path)):
        before = os.listdir("/dev/fd")
        with pytest.raises(UsageError):
            PredictionFile(path)
        assert len(os.listdir("/dev/fd")) == len(before)


def test_a_folder_with_files_of_others_is_refused(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(UsageError, match="not of an evaluation"):
        PredictionFile(tmp_path / "predictions.jsonl")


def test_a_file_without_predictions_is_a_usage_error(tmp_path):
    row = to_row(predict())
    lines = [json.dumps({key: row[key] for key in row if key != name}) for name in row]
    (tmp_path / "predictions.jsonl").write_text("\n".join(["[]", "7", *lines, "[" * 100_000]))
    for name, reason in (("predictions.jsonl", "holds no predictions"), ("gone.jsonl", "there is no such")):
        with pytest.raises(UsageError, match=reason):
            read_predictions(tmp_path / name)


def test_a_system_is_named_by_what_tells_it_from_others_of_its_method():
    systems = [DIRECT, System("prompt-r1", "large", "runs/a"), System("prompt-r1", "large", "runs/b")]
    names = ["direct", "prompt-r1 (runs/a)", "prompt-r1 (runs/b)"]
    assert list(short_names(systems).values()) == names
    other = System("prompt-r1", "small", "runs/a")
    assert short_names([*systems, other])[other] == "prompt-r1 (small, runs/a)"
