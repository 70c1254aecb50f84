"""Datasets of the Hub become questions; a stand-in for the package `datasets` reads from memory."""

import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest

from prompt_r1.config.train import train_config
from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.errors import UsageError
from prompt_r1.types import Question


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
    config, folder = train_config(["--data", "hf:org/held:train"])
    assert folder == "mini-held-train" and config.test_data == ()
    training, validation = training_and_validation(config.data, config.val_data, seed=0, limit=100)
    assert (len(training), len(validation)) == (117, 13)
    assert {one.dataset for one in training} == {"held"}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf:org/wrong:valid", r"could not be loaded from the Hub \(.*Unknown split 'valid'"),
        ("hf:org/other:train", "hf:org/other:train, row 1: the field question is missing"),
        ("hf:org/wrong", "hf: names a dataset of the Hub, hf:ORG/NAME:SPLIT"),
        ("hf:./folder", "give those of this machine as a FILE"),
    ],
)
def test_a_wrong_name_split_or_column_is_refused_in_one_sentence(hub, name, sentence):
    hub["org/other", None, "train"] = [{"frage": "Where?", "antwort": "Rome"}]
    with pytest.raises(UsageError, match=sentence) as error:
        find_questions([name], "train", 0)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_one_sentence_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets"):
        find_questions(["hf:org/name:train"], "train", 0)
