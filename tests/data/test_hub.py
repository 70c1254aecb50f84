"""Questions of the Hub, whose package `datasets` has a stand-in that reads from memory, and of a function."""

import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest

from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.errors import UsageError
from prompt_r1.types import Question
from tests.support.settings import train_config


class Table(list):
    """The rows of a loaded dataset."""

    def with_format(self, name: str) -> "Table":
        assert name == "arrow"
        return self

    def iter(self, batch_size: int) -> list[pa.Table]:
        return [pa.Table.from_pylist(self[n : n + batch_size]) for n in range(0, len(self), batch_size)]


@pytest.fixture
def hub(monkeypatch):
    tables: dict[tuple[str, str | None, str], list[dict[str, object]]] = {}

    def load_dataset(name: str, config: str | None, split: str) -> Table:
        if (name, config, split) not in tables:
            raise ValueError(f"Unknown split {split!r}.\nShould be another.")
        return Table(tables[name, config, split])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return tables


def test_a_dataset_of_the_hub_has_the_columns_of_a_question_file(hub):
    row = {"question": "2 + 2?", "answers": ["4"], "id": "two", "level": 1}
    hub["openai/gsm8k", "main", "test[:1]"] = [row]
    expected = Question("two", "gsm8k", "2 + 2?", ("4",), "math", {"level": 1})
    assert find_questions(["hf:openai/gsm8k/main:test[:1]"], "train", 0) == [expected]


def test_a_run_holds_out_a_part_of_a_dataset_of_the_hub(hub):
    hub["org/held", None, "train"] = [{"question": f"Who is {n}?", "answer": str(n)} for n in range(130)]
    config = train_config(["--data", "hf:org/held:train"])
    assert config.test_data == ()
    training, validation = training_and_validation(config.data, config.val_data, seed=0, limit=100)
    assert (len(training), len(validation)) == (117, 13)
    assert {one.dataset for one in training} == {"held"}


def test_a_missing_package_is_one_sentence_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets"):
        find_questions(["hf:org/name:train"], "train", 0)


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

def arrays(split, seed):
    import numpy as np
    yield {"question": "Why?", "answer": np.float64(2)}
    yield {"question": "Who?", "answers": np.array(["x", "y"])}
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
    config = train_config(["--data", "py:own_sums:sums"])
    assert config.val_data == config.test_data == ("py:own_sums:sums",)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf:org/wrong:valid", r"could not be loaded from the Hub \(.*Unknown split 'valid'"),
        ("hf:org/other:train", "hf:org/other:train, row 1: the field question is missing"),
        ("hf:org/wrong", "hf: names a dataset of the Hub, hf:ORG/NAME:SPLIT"),
        ("hf:./folder", "a question file on this machine is given by its path"),
        ("py:own_sums:broken", r"called with a split and a seed, raised ZeroDivisionError: no sum \(own_s"),
        ("py:own_sums:counts", "called with a split and a seed, raised TypeError: "),
        ("py:own_sums:texts", "row 1: expected a JSON object, not str 'Who"),
        ("py:own_sums:arrays", "row 2: the field answers must contain texts or numbers, not ndarray"),
        ("py:own_sums:absent", "cannot import 'own_sums:absent'"),
        ("py:own_sums", "give MODULE:NAME"),
    ],
)
def test_a_dataset_or_function_that_gives_no_questions_is_refused_in_one_sentence(
    hub, in_folder, name, sentence
):
    hub["org/other", None, "train"] = [{"frage": "Where?", "antwort": "Rome"}]
    with pytest.raises(UsageError, match=sentence) as error:
        find_questions([name], "train", 0)
    assert "\n" not in str(error.value)
