"""The systems of an evaluation: which ones are run, and when their answers can be reused."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import evaluate
from prompt_r1.agent.names import AgentSpec
from prompt_r1.config.evaluate import EvaluateConfig, evaluate_config, with_protocol
from prompt_r1.config.methods import METHODS
from prompt_r1.config.train import TrainConfig
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.systems import (
    WITHOUT_ENVIRONMENT,
    choose_systems,
    digest_of,
    resolve_agents,
    with_data_args,
)


@pytest.fixture
def agents(tmp_path) -> dict[str, AgentSpec]:
    """Two trained agents and their common start; the weights are a few bytes."""
    for name in ("a", "b", "start"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    config = TrainConfig(env="large")
    return {f"runs/{name}": AgentSpec(tmp_path / name, config, str(tmp_path / "start")) for name in "ab"}


def settings_of(
    agents: dict[str, AgentSpec],
    *,
    methods: tuple[str, ...] = ("direct", "opro", "prompt-r1"),
    seed: int = 0,
    **settings: object,
) -> dict[str, str]:
    """The digest of each method with the first agent."""
    config = EvaluateConfig(method=methods, **settings)
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


def test_a_task_is_evaluated_with_the_sizes_of_the_agents_training(agents):
    """Sums of other sizes were asked than were trained on, and a game's questions did not fit its replies."""
    trained = {
        name: replace(spec, config=replace(spec.config, data_args='{"max_terms": 4}'))
        for name, spec in agents.items()
    }
    task = EvaluateConfig(data=("reasoning_gym:chain_sum",))
    assert with_data_args(task, trained).data_args == '{"max_terms": 4}'
    given = replace(task, data_args='{"max_terms": 5}')
    assert with_data_args(given, trained) == given
    assert with_data_args(EvaluateConfig(data=("mini",)), trained).data_args == ""
    with pytest.raises(UsageError, match="runs/b and runs/a were trained with other sizes: give --data-args"):
        with_data_args(task, {"runs/b": agents["runs/b"], "runs/a": trained["runs/a"]})


@pytest.mark.parametrize("change", [{"env_args": '{"top_p": 0.5}'}, {"route": "uniform"}, {"seed": 1}])
def test_answers_are_not_reused_if_a_setting_that_affects_them_changes(agents, change):
    before, after = settings_of(agents), settings_of(agents, **change)
    assert all(before[method] != after[method] for method in before)


@pytest.mark.parametrize("change", [{"limit": 3}, {"out": "x"}, {"env_timeout": 1.0}, {"tables": True}])
def test_answers_are_reused_if_another_setting_changes(agents, change):
    assert settings_of(agents) == settings_of(agents, **change)


AFFECTED = [
    ({"opro_steps": 3}, "random-search opro"),
    ({"gepa_batch": 4}, "gepa"),
    ({"textgrad_epochs": 4}, "textgrad"),
    ({"shots": 2}, "cot-few-shot"),
    ({"samples": 9}, "self-consistency"),
    ({"sft_lr": 1e-3}, "sft"),
    ({"best_of": 4}, "best-of-n"),
    ({"rft_calls": 99}, "rft"),
    ({"imitation_lr": 1e-3}, "bc rft"),
    ({"optimize_val": 20}, "textgrad gepa"),
    ({"optimizer_env": "other"}, "random-search opro textgrad gepa"),
    ({"optimizer_price": ("1", "2")}, ""),
    ({"top_p": 0.8}, "self-consistency sft grpo-only untrained bc rft agent-only prompt-r1"),
    ({"temperature": 1.0}, "self-consistency sft grpo-only untrained bc rft agent-only prompt-r1"),
    (
        {"env_args": '{"top_p": 0.5}'},
        " ".join(method for method in METHODS if method not in WITHOUT_ENVIRONMENT),
    ),
    ({"method_args": '{"cot": {"temperature": 0.5}}'}, "cot"),
    ({"answer_format": "only"}, "direct cot cot-few-shot self-consistency random-search opro textgrad gepa"),
]


@pytest.mark.parametrize(("change", "affected"), AFFECTED)
def test_a_setting_affects_the_answers_of_its_methods_only(agents, change, affected):
    """Changing --opro-steps once made `direct` answer and pay again."""
    before, after = (settings_of(agents, methods=METHODS, **settings) for settings in ({}, change))
    assert {method for method in METHODS if before[method] != after[method]} == set(affected.split())


def test_a_rewritten_training_file_is_not_the_same_setting(agents, tmp_path):
    """Only the names of the files were compared, so the answers of the old prompt were reused."""
    file = tmp_path / "train.jsonl"
    digests = []
    for content in ("a", "b"):
        file.write_text(content)
        digest_of.cache_clear()
        digests.append(settings_of(agents, methods=METHODS, train_data=(str(file),)))
    changed = {method for method in METHODS if digests[0][method] != digests[1][method]}
    assert changed == {"cot-few-shot", "random-search", "opro", "textgrad", "gepa", "sft", "rft"}


def test_another_tokenizer_or_local_environment_is_not_the_same_setting(agents, tmp_path):
    environment = tmp_path / "model"
    environment.mkdir()
    before = settings_of(agents, env=(f"hf:{environment}",))
    (environment / "model.safetensors").write_bytes(b"weights")
    digest_of.cache_clear()
    after = settings_of(agents, env=(f"hf:{environment}",))
    assert all(before[method] != after[method] for method in before)
    (Path(agents["runs/a"].path) / "tokenizer.json").write_text("{}")
    digest_of.cache_clear()
    last = settings_of(agents, env=(f"hf:{environment}",))
    assert last["prompt-r1"] != after["prompt-r1"] and last["direct"] == after["direct"]


def test_answers_of_an_agent_are_not_reused_with_other_weights(agents):
    before = settings_of(agents)
    (Path(agents["runs/a"].path) / "model.safetensors").write_bytes(b"trained further")
    digest_of.cache_clear()
    after = settings_of(agents)
    assert before["prompt-r1"] != after["prompt-r1"] and before["direct"] == after["direct"]


def test_answers_of_an_agent_are_not_reused_in_another_game(agents):
    [(name, agent), *_] = agents.items()
    short = {name: replace(agent, config=replace(agent.config, instruction="short"))}
    before, after = settings_of(agents), settings_of(short)
    assert before["prompt-r1"] != after["prompt-r1"] and before["direct"] == after["direct"]


@pytest.mark.parametrize("flag", ["--textgrad-batch", "--opro-train", "--repeats"])
def test_a_setting_out_of_range_is_a_usage_error(flag):
    with pytest.raises(UsageError, match=f"{flag} must be above 0, not 0"):
        evaluate.main([flag, "0"])


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_request_fields_that_are_no_json_object_are_a_usage_error(agents, text):
    with pytest.raises(UsageError, match="--method-args"):
        settings_of(agents, method_args=text)


def test_the_release_protocol_is_one_flag_and_other_flags_still_count():
    config = evaluate_config(["--protocol", "release"])
    assert (config.temperature, config.top_p, config.max_turns) == (0.7, 0.8, 10)
    assert config.metrics == "official"
    config = evaluate_config(["--protocol", "release", "--temperature", "0.2"])
    assert (config.temperature, config.top_p) == (0.2, 0.8)
    ours = evaluate_config([])
    assert (ours.temperature, ours.top_p, ours.max_turns, ours.metrics) == (0.0, 1.0, 0, "strict")


def test_the_turns_of_a_protocol_are_those_of_the_game_and_its_answers_are_not_ours(asking_agent):
    """Answers of the two protocols may be in one folder; each finds its own."""
    settings = {"method": ("prompt-r1", "direct"), "agent": (str(asking_agent),), "env": ("mini",)}
    digests = []
    for config in (EvaluateConfig(**settings), with_protocol(EvaluateConfig(**settings, protocol="release"))):
        agents = resolve_agents(config)
        turns = agents[str(asking_agent)].config.game.max_turns
        digests.append((turns, {one.system.method: one.setting for one in choose_systems(config, agents, 0)}))
    (ours, before), (release, after) = digests
    assert release == 10 != ours
    assert before["prompt-r1"] != after["prompt-r1"] and before["direct"] == after["direct"]
