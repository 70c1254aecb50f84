"""The declared fields: their defaults are the published ones, and no list of names depends on luck."""

from dataclasses import Field, fields
from typing import Any

import pytest

from infer import InferConfig
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.environment import EnvironmentConfig
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.fields import Range, check_number
from prompt_r1.config.methods import MethodConfig, SftConfig
from prompt_r1.config.serve import ServeConfig
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.errors import UsageError
from prompt_r1.reward import RULES

CONFIGS = (EnvironmentConfig, AgentConfig, TrainConfig)
CONFIGS += (MethodConfig, EvaluateConfig, InferConfig, ServeConfig, SftConfig)


def names(config: type[Any], mark: str) -> set[str]:
    return {f.name for f in fields(config) if f.metadata[mark]}


def own_fields(config: type[Any], *types: object) -> list[Field[Any]]:
    """The fields that a config declares itself, of these types (none: of all)."""
    return [f for f in fields(config) if f.name in config.__annotations__ and (not types or f.type in types)]


def interval(allowed: Range) -> str:
    """A range in words, such as `above 0, below 1000`."""
    bounds = {"above": allowed.above, "at least": allowed.at_least, "below": allowed.below}
    return ", ".join(f"{word} {bound:.10g}" for word, bound in bounds.items() if bound is not None) or "any"


def numbers(config: type[Any]) -> dict[str, float]:
    """The numeric defaults of a config's own fields, except 0 (no limit, all, or the default seed)."""
    return {f.name: f.default for f in own_fields(config, int, float) if f.default}


def test_the_settings_that_define_a_run_are_those_of_the_game_the_reward_and_the_update():
    """A resumed run must agree on each of them."""
    assert names(TrainConfig, "identifies") == set(
        "agent env env_args env_thinking env_system route data data_args seed instruction max_turns max_new "
        "max_tokens max_reply_tokens rule answer_metric reward questions group_size "
        "mini_batch lr beta2 weight_decay grad_clip clip clip_high advantages "
        "drop_even_groups adapter_rank kl_coef importance_cap loss temperature".split()
    )


def test_training_has_the_defaults_of_table_6_and_the_released_run_script():
    assert numbers(AgentConfig) == {
        **{"max_turns": 5, "max_new": 1024, "max_tokens": 8192, "max_reply_tokens": 1024},
        "temperature": 1.0,
    }
    assert numbers(TrainConfig) == {
        **{"steps": 320, "questions": 128, "group_size": 5, "mini_batch": 64},
        **{"lr": 1e-6, "beta2": 0.999, "weight_decay": 0.01, "grad_clip": 1.0},
        **{"clip": 0.2, "kl_coef": 0.001, "importance_cap": 2.0},
        **{"val_every": 20, "val_limit": 256, "save_every": 20},
        **{"rank_timeout": 3600.0, "tokens_per_batch": 16384},
    }
    assert numbers(EnvironmentConfig) == {"env_timeout": 120.0, "env_concurrency": 64}


def test_a_server_listens_on_this_machine_only_by_default():
    assert numbers(ServeConfig) == {"port": 8000, "max_sessions": 64, "request_seconds": 300.0, "seed": -1}
    assert ServeConfig().host == "127.0.0.1"


def test_the_mini_preset_has_the_documented_values():
    """A tiny agent in 80 steps on one thread, in the short format and the released rule."""
    assert PRESETS["paper"] == {}
    assert PRESETS["mini"] == {
        **dict.fromkeys(("agent", "env"), "mini"),
        **dict.fromkeys(("data", "val_data", "test_data"), ("mini",)),
        **{"instruction": "short", "rule": "release", "max_turns": 4, "max_new": 48, "max_tokens": 320},
        **{"steps": 80, "questions": 16, "mini_batch": 40, "val_limit": 100, "tokens_per_batch": 4096},
        **{"lr": 5e-4, "beta2": 0.98, "weight_decay": 0.0},
        **{"dtype": "float32", "checkpointing": False},
    }


def test_a_question_is_asked_and_scored_greedily_once_and_with_all_tokens_by_default():
    assert numbers(EvaluateConfig) == {"repeats": 1, "seed": -1, "top_p": 1.0}
    assert numbers(InferConfig) == {"seed": -1}
    assert EvaluateConfig().data == ()  # the questions that the environments know


def test_only_the_switches_for_memory_and_speed_are_on_by_default():
    on = {f"{config.__name__}.{f.name}" for config in CONFIGS for f in own_fields(config, bool) if f.default}
    assert on == {"TrainConfig.checkpointing", "SftConfig.checkpointing"}


UNUSUAL = {
    "AgentConfig.temperature": "at least 1e-06",
    "TrainConfig.questions": "above 0, below 100001",
    "TrainConfig.group_size": "at least 2, below 10001",  # it needs two games to compare
    **dict.fromkeys(("TrainConfig.lr", "SftConfig.lr"), "above 0, below 1000"),
    "TrainConfig.beta2": "at least 0, below 1",
    "TrainConfig.weight_decay": "at least 0",
    "TrainConfig.rank_timeout": "above 0, below 1000000000",
    "EvaluateConfig.top_p": "above 0, below 1.000000001",
    "ServeConfig.port": "at least 0, below 65536",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_number_is_above_0_unless_0_is_its_default_or_explained_in_its_help(config):
    for f in own_fields(config, int, float):
        zero = f.default == 0 or "0:" in f.metadata["help"]
        usual = "any" if f.name == "seed" else "at least 0" if zero else "above 0"
        expected = UNUSUAL.get(f"{config.__name__}.{f.name}", usual)
        assert interval(f.metadata["range"]) == expected, f.name


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (Range(above=0), (1e-9, 10**15, 1e30), (0, -1, 10**15 + 1, 1.1e30, float("inf"), float("nan"))),
        (Range(at_least=2), (2,), (1, 1.999)),
        (Range(at_least=0, below=1), (0, 0.999), (1, -1e-9)),
        (Range(), (-(10**15), -1e30), (-(10**15) - 1, -1.1e30, float("-inf"))),
    ],
)
def test_the_bounds_of_a_range_are_meant_as_they_are_called(allowed, inside, outside):
    for value in inside:
        check_number("--x", value, allowed)
    for value in outside:
        with pytest.raises(UsageError, match="--x must be "):
            check_number("--x", value, allowed)


def test_the_named_choices_are_those_that_the_method_knows():
    choices = {f.name: f.metadata["choices"] for f in fields(TrainConfig)}
    assert choices["rule"] == tuple(RULES)
