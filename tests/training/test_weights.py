"""The models of a training: what is loaded, and how often it is checked."""

from prompt_r1.agent import loading
from prompt_r1.agent.agent import load_agent
from prompt_r1.config.train import TrainConfig
from prompt_r1.training.weights import load_reference
from tests import tiny
from tests.games import CPU, ONE_RANK


def test_a_model_is_checked_when_its_agent_is_loaded_and_not_again(tmp_path, monkeypatch):
    """The check takes forwards of the whole model; the reference has the same weights."""
    checked = []
    check_model = loading.check_model
    monkeypatch.setattr(loading, "check_model", lambda policy: checked.append(check_model(policy)))
    folder, config = tiny.save_agent(tmp_path), TrainConfig(temperature=0.7)
    agent = load_agent(folder, config, CPU)
    assert len(checked) == 1
    reference = load_reference(folder, config, agent, ONE_RANK)
    assert len(checked) == 1 and reference.temperature == 0.7
    assert not any(weight.requires_grad for weight in reference.parameters())
