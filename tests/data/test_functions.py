"""Questions that a function of the user's makes: `--data py:MODULE:FUNCTION`."""

import pytest

from prompt_r1.config.train import train_config
from prompt_r1.data.questions import find_questions
from prompt_r1.errors import UsageError
from prompt_r1.types import Question

CODE = """
SIZES = {"train": 3, "validation": 2, "test": 1}

def sums(split, seed):
    for number in range(SIZES[split]):
        text = f"{number} + {seed}?"
        yield {"id": f"{split}/{seed}/{number}", "question": text, "answer": number + seed, "n": 1}

def broken(split, seed):
    raise ZeroDivisionError("no\\nsum")

def texts(split, seed):
    return ["Who?"]

def counts():
    return []
"""


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    (tmp_path / "own_sums.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_is_called_with_the_split_and_the_seed_and_its_rows_are_questions(in_folder):
    found = find_questions(["py:own_sums:sums"], "validation", 5)
    rows = [("validation/5/0", "0 + 5?", ("5",)), ("validation/5/1", "1 + 5?", ("6",))]
    assert found == [Question(name, "sums", text, golds, extra={"n": 1}) for name, text, golds in rows]


def test_a_function_brings_its_own_validation_and_test_questions(in_folder):
    config, name = train_config(["--data", "py:own_sums:sums"])
    assert config.val_data == config.test_data == ("py:own_sums:sums",)
    assert name == "mini-py-own_sums-sums"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "py:own_sums:broken",
            r"called with a split and a seed, raised ZeroDivisionError: no sum \(own_sums",
        ),
        ("py:own_sums:counts", "called with a split and a seed, raised TypeError: "),
        ("py:own_sums:texts", "row 1: expected a JSON object, not str 'Who"),
        ("py:own_sums:absent", "cannot import 'own_sums:absent'"),
        ("py:own_sums", "give MODULE:NAME"),
    ],
)
def test_a_function_that_makes_no_questions_is_explained_in_one_sentence(in_folder, name, sentence):
    with pytest.raises(UsageError, match=sentence) as error:
        find_questions([name], "train", 0)
    assert "\n" not in str(error.value)
