"""The systems of an evaluation: which ones are run, and when their answers can be reused."""

from collections import Counter
from pathlib import Path

import pytest

import evaluate
from prompt_r1.agent.names import AgentSpec
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.train import TrainConfig
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.systems import choose_systems, digest_of


@pytest.fixture
def agents(tmp_path) -> dict[str, AgentSpec]:
    """Two trained agents and their common start; the weights are a few bytes."""
    for name in ("a", "b", "start"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    config = TrainConfig(env="large")
    return {f"runs/{name}": AgentSpec(tmp_path / name, config, str(tmp_path / "start")) for name in "ab"}


def settings_of(agents: dict[str, AgentSpec], *, seed: int = 0, **settings: object) -> dict[str, str]:
    """The digest of each method with the first agent."""
    config = EvaluateConfig(method=("direct", "opro", "prompt-r1"), **settings)
    first = dict(list(agents.items())[:1])
    return {setup.system.method: setup.setting for setup in choose_systems(config, first, seed)}


def test_tables_runs_the_methods_of_table_5_with_every_environment_and_agent(agents):
    config = EvaluateConfig(tables=True, env=("large", "other"))
    counts = Counter(setup.system.method for setup in choose_systems(config, agents, 0))
    assert counts["direct"] == 2 and counts["prompt-r1"] == 4
    assert all(count == 1 for method, count in counts.items() if method not in ("direct", "prompt-r1"))
    assert len(counts) == 11 and "grpo-only" not in counts, "grpo-only needs --grpo-agent"


def test_by_default_the_environment_is_that_of_the_training(agents):
    setups = choose_systems(EvaluateConfig(), agents, 0)
    assert {setup.system.environment for setup in setups} == {"large"}
    assert [setup.system.method for setup in setups] == ["direct", "untrained", "prompt-r1", "prompt-r1"]


@pytest.mark.parametrize(
    "change", [{"temperature": 1.0}, {"env_args": '{"top_p": 0.5}'}, {"route": "uniform"}, {"seed": 1}]
)
def test_answers_are_not_reused_if_a_setting_that_affects_them_changes(agents, change):
    before, after = settings_of(agents), settings_of(agents, **change)
    assert all(before[method] != after[method] for method in before)


@pytest.mark.parametrize("change", [{"limit": 3}, {"out": "x"}, {"env_timeout": 1.0}, {"tables": True}])
def test_answers_are_reused_if_another_setting_changes(agents, change):
    assert settings_of(agents) == settings_of(agents, **change)


def test_settings_of_the_compared_methods_do_not_affect_games(agents):
    before, after = settings_of(agents), settings_of(agents, opro_steps=3)
    assert before["opro"] != after["opro"] and before["prompt-r1"] == after["prompt-r1"]


def test_answers_of_an_agent_are_not_reused_with_other_weights(agents):
    before = settings_of(agents)
    (Path(agents["runs/a"].path) / "model.safetensors").write_bytes(b"trained further")
    digest_of.cache_clear()
    after = settings_of(agents)
    assert before["prompt-r1"] != after["prompt-r1"] and before["direct"] == after["direct"]


@pytest.mark.parametrize("flag", ["--textgrad-batch", "--opro-train", "--repeats"])
def test_a_setting_out_of_range_is_a_usage_error(flag):
    with pytest.raises(UsageError, match=f"{flag} must be above 0, not 0"):
        evaluate.main([flag, "0"])
