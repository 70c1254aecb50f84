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

CONFIGS = (EnvironmentConfig, AgentConfig, TrainConfig)
CONFIGS += (MethodConfig, EvaluateConfig, InferConfig, ServeConfig, SftConfig)


def names(config: type[Any], mark: str) -> set[str]:
    return {f.name for f in fields(config) if f.metadata[mark]}


def own_fields(config: type[Any], *types: object) -> list[Field[Any]]:
    """The fields that a config declares itself, of these types (none: of all)."""
    return [f for f in fields(config) if f.name in config.__annotations__ and (not types or f.type in types)]


def numbers(config: type[Any]) -> dict[str, float]:
    """The numeric defaults of a config's own fields, except 0 (no limit, all, or the default seed)."""
    return {f.name: f.default for f in own_fields(config, int, float) if f.default}


def test_the_settings_that_define_a_run_are_those_of_the_game_the_reward_and_the_update():
    """A resumed run must agree on each of them."""
    assert names(TrainConfig, "identifies") == set(
        "agent env env_args env_thinking env_system route data seed instruction max_turns max_new "
        "max_tokens max_reply_tokens rule reward questions group_size "
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
