"""`prompt-r1 push`, by the real huggingface_hub against a Hub in memory."""

import json
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from prompt_r1.config.train import TrainConfig
from prompt_r1.config.yaml_files import GAME_FILE, STEP_FILE, write_yaml
from prompt_r1.errors import UsageError
from prompt_r1.storage.export import model_card
from prompt_r1.storage.push import main
from tests.support import tiny
from tests.support.fake_hub import FakeHub, answered_by, httpx2

TABLE = "| method | n | EM |\n|---|---:|---:|\n| trained agent | 9 | 0.500 |\n"


@pytest.fixture
def run(tmp_path):
    """A run folder with an exported agent, whose base model has a licence."""
    base, agent = tmp_path / "base", tmp_path / "run" / "agent"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base")
    tiny.save_agent(agent)
    config = replace(TrainConfig(), agent="Qwen/Qwen3-4B", val_data=("held-out",))
    write_yaml(config, agent / GAME_FILE)
    metrics = {"step": 7, "val/em": 0.25, "val/f1": 0.5, "val/reward": float("nan"), "val/n": 100}
    (agent / STEP_FILE).write_text(json.dumps(metrics))
    card = model_card(config.agent, config.env, config.described(7), seed=0, base=base)
    (agent / "README.md").write_text(card, "utf-8")
    (agent.parent / "test.md").write_text(TABLE)
    (agent.parent / "journal").mkdir()
    (agent.parent / "journal" / "calls.jsonl").write_text("private")
    return agent.parent


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    hub = FakeHub(token="hf_of_the_test")
    with answered_by(hub.answer):
        yield hub


def test_the_agent_is_pushed_whole_and_nothing_else_of_its_run(run, hub, capsys):
    main([str(run), "org/name"])
    pushed, agent = hub.files["models/org/name"], run / "agent"
    assert sorted(pushed) == sorted(path.name for path in agent.iterdir())
    assert all(
        content == (agent / name).read_bytes() for name, content in pushed.items() if name != "README.md"
    )
    assert sum("/commit/" in request for request in hub.requests) == 1 and not hub.private
    assert capsys.readouterr().out == "https://huggingface.co/org/name\n"


def test_the_card_on_the_hub_names_base_model_licence_and_scores(run, hub):
    main([str(run / "agent"), "org/name"])
    text = hub.files["models/org/name"]["README.md"].decode()
    card = ModelCard(text)
    assert (card.data.base_model, card.data.license) == ("Qwen/Qwen3-4B", "apache-2.0")
    scores = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert scores == {"exact_match": 0.25, "f1": 0.5}, "a reward that is not finite is left out"
    assert "On 100 validation questions (`held-out`)" in text and TABLE in text
    assert "hf download org/name --local-dir name\nprompt-r1 ask --agent name --env MODEL" in text
    assert 'from_pretrained("org/name")' in text and "path/to/this/folder" not in text


def test_an_agent_without_licence_is_pushed_with_a_warning_and_one_can_be_named(run, hub, capsys):
    card = run / "agent" / "README.md"
    card.write_text(card.read_text("utf-8").replace("license: apache-2.0\n", ""), "utf-8")
    main([str(run), "org/name", "--private"])
    assert "names no licence" in capsys.readouterr().out and hub.private == ["org/name"]
    main([str(run), "org/name", "--license", "mit"])
    assert "names no licence" not in capsys.readouterr().out
    assert ModelCard(hub.files["models/org/name"]["README.md"].decode()).data.license == "mit"


def test_what_cannot_be_pushed_is_refused_in_one_sentence(run, hub, tmp_path, monkeypatch):
    def refused(*line) -> str:
        with pytest.raises(UsageError) as error:
            main([str(word) for word in line])
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "there is no exported agent" in refused(tmp_path, "org/name")
    assert "Repo id must" in refused(run, "a bad/name")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert "401" in refused(run, "org/name")
    (run / "agent" / "secret").symlink_to(tmp_path / "base" / "README.md")
    assert "is a symbolic link" in refused(run, "org/name")
    assert "models/org/name" not in hub.files


def test_without_network_nothing_is_pushed_and_the_hub_is_asked_once(run):
    requests = []

    def no_network(request):
        requests.append(request)
        raise httpx2.ConnectError("Name or service not known", request=request)

    with answered_by(no_network), pytest.raises(UsageError, match="the Hub cannot be reached, so nothing"):
        main([str(run), "org/name"])
    assert len(requests) == 1
