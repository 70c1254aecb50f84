"""Questions of datasets on the Hub, by the real `datasets` against a Hub in memory."""

import json
from collections import Counter

import huggingface_hub.constants
import pytest

from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.train_settings import train_config
from prompt_r1.data.__main__ import main
from prompt_r1.data.files import load_questions
from prompt_r1.data.hub import hub_questions
from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.systems import leak_warnings
from tests.support.fake_hub import FakeHub, answered_by, httpx2

datasets = pytest.importorskip("datasets")
ROWS = [
    {"question": "Who?", "answers": ["Anna", "A. Berg"], "id": "one", "dataset": "PopQA", "level": 3},
    {"question": "2 + 2?", "answers": ["4"], "id": "two", "dataset": "GSM8K", "level": 1},
]
OTHER = [{"frage": "Where?", "antwort": "Rome"}]


def json_lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = FakeHub()
    with answered_by(hub.answer):
        yield hub


def test_a_dataset_of_the_hub_has_the_columns_of_a_question_file(hub, tmp_path):
    content = json_lines(ROWS)
    hub.files["datasets/org/columns"] = {"train.jsonl": content, "test.jsonl": json_lines(ROWS[:1])}
    (tmp_path / "columns.jsonl").write_bytes(content)
    expected = load_questions(tmp_path / "columns.jsonl")
    assert find_questions(["hf:org/columns:train"], "test", 0) == expected
    assert hub_questions("hf:org/columns:train[1:]") == expected[1:]
    assert hub_questions("hf:org/columns/default:test") == expected[:1]
    assert Counter(one.kind for one in expected) == {"qa": 1, "math": 1} and expected[0].extra == {"level": 3}
    [warning] = leak_warnings(expected[:1], EvaluateConfig(train_data=("hf:org/columns:train",)), {})
    assert "1 of the 1 test questions also occur in hf:org/columns:train" in warning


def test_a_run_holds_out_a_part_of_a_dataset_of_the_hub(hub):
    rows = [{"question": f"Who is {n}?", "answer": str(n)} for n in range(30)]
    hub.files["datasets/org/held"] = {"train.jsonl": json_lines(rows)}
    config, folder = train_config(["--data", "hf:org/held:train"])
    assert folder == "mini-held-train" and config.test_data == ()
    training, validation = training_and_validation(config.data, config.val_data, seed=0, limit=100)
    assert (len(training), len(validation)) == (27, 3)
    assert {one.dataset for one in training} == {"held"}


def test_other_column_names_are_said_and_converted(hub, tmp_path, capsys):
    hub.files["datasets/org/other"] = {"train.jsonl": json_lines(OTHER)}
    with pytest.raises(
        UsageError, match=r"hf:org/other:train, row 1: the field question is missing"
    ) as error:
        hub_questions("hf:org/other:train")
    assert "--question-field COLUMN" in str(error.value)
    out = tmp_path / "other.jsonl"
    line = f"convert --from questions --in hf:org/other:train --out {out} --question-field frage"
    main([*line.split(), "--answer-field", "antwort"])
    assert [(one.text, one.answers) for one in load_questions(out)] == [("Where?", ("Rome",))]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf:org/wrong:valid", 'Unknown split "valid". Should be one of'),
        ("hf:org/wrong/b:train", "BuilderConfig 'b' not found"),
        ("hf:org/absent:train", "'org/absent' doesn't exist on the Hub or cannot be accessed"),
        ("hf:org/wrong", "hf: names a dataset of the Hub, hf:ORG/NAME:SPLIT"),
        ("hf:./folder", "give those of this machine as a FILE"),
    ],
)
def test_a_wrong_name_or_split_is_refused_in_one_sentence(hub, name, sentence):
    hub.files["datasets/org/wrong"] = {"train.jsonl": json_lines(ROWS)}
    with pytest.raises(UsageError) as error:
        hub_questions(name)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_without_network_the_hub_is_asked_once():
    """`datasets` tried six times, for 24 seconds, with a line for each."""
    requests = []

    def no_network(request):
        requests.append(request)
        raise httpx2.ConnectError("Name or service not known", request=request)

    with answered_by(no_network), pytest.raises(UsageError, match="the Hub cannot be reached"):
        hub_questions("hf:org/offline:train")
    assert len(requests) == 1
