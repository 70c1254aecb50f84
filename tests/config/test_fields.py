"""The declared fields: their defaults are the published ones, and no list of names depends on luck."""

from dataclasses import fields
from typing import Any

import pytest

from infer import InferConfig
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.fields import EnvironmentConfig
from prompt_r1.config.methods import MethodConfig, SftConfig
from prompt_r1.config.serve import ServeConfig
from prompt_r1.config.train import TrainConfig


def names(config: type[Any], mark: str) -> set[str]:
    return {f.name for f in fields(config) if f.metadata[mark]}


def numbers(config: type[Any]) -> dict[str, float]:
    """The numeric defaults of a config's own fields, except 0 (no limit, all, or the default seed)."""
    own = config.__annotations__
    return {
        f.name: f.default for f in fields(config) if f.name in own and f.type in (int, float) and f.default
    }


def test_the_settings_that_define_a_run_are_those_of_the_game_the_reward_and_the_update():
    """A resumed run must agree on each of them; `mini_batch_of` changes the size of an optimiser step."""
    assert names(TrainConfig, "identifies") == set(
        "agent env env_args route data seed instruction max_turns max_new max_tokens max_reply_tokens "
        "force_answer stop_tags rule answer_metric reward questions group_size mini_batch mini_batch_of lr "
        "beta1 beta2 weight_decay grad_clip clip clip_high ratio advantages drop_even_groups kl_coef "
        "importance_cap loss temperature".split()
    )


def test_answers_of_an_evaluation_are_reused_only_with_the_same_requests_and_temperature():
    assert names(EvaluateConfig, "identifies") == {"env_args", "route", "temperature"}


@pytest.mark.parametrize(
    ("config", "everyday"),
    [
        (
            TrainConfig,
            "agent env data val_data test_data out resume seed max_turns steps questions lr dry_run explain "
            "env_price max_env_usd",
        ),
        (EvaluateConfig, "data method agent env limit out seed env_price max_env_usd"),
        (
            ServeConfig,
            "agent env host port model_name max_sessions request_calls request_usd request_seconds seed "
            "env_price max_env_usd",
        ),
        (InferConfig, "question questions agent env json save seed temperature env_price"),
    ],
)
def test_the_short_help_shows_the_everyday_flags(config, everyday):
    assert names(config, "everyday") == set(everyday.split())


def test_training_has_the_defaults_of_table_6_and_the_released_run_script():
    assert numbers(TrainConfig) == {
        **{"max_turns": 5, "max_new": 1024, "max_tokens": 8192, "max_reply_tokens": 1024},
        **{"steps": 320, "questions": 128, "group_size": 5, "mini_batch": 64},
        **{"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "grad_clip": 1.0},
        **{"clip": 0.2, "kl_coef": 0.001, "importance_cap": 2.0, "temperature": 1.0},
        **{"val_every": 20, "val_limit": 256, "save_every": 20, "keep": 2},
        **{"rank_timeout": 3600.0, "tokens_per_batch": 16384},
    }
    assert numbers(EnvironmentConfig) == {"env_concurrency": 64}


def test_a_server_listens_on_this_machine_only_by_default():
    assert numbers(ServeConfig) == {"port": 8000, "max_sessions": 64, "request_seconds": 300.0, "seed": -1}
    assert ServeConfig().host == "127.0.0.1"


def test_fine_tuning_has_the_defaults_of_table_7():
    assert numbers(SftConfig) == {
        "rank": 8,
        "alpha": 16.0,
        "lr": 1e-4,
        "epochs": 3,
        "batch_size": 4,
        "accumulate": 8,
        "cutoff": 2048,
    }


def test_the_compared_methods_have_their_authors_defaults():
    assert numbers(MethodConfig) == {
        **{"shots": 4, "optimize_val": 50, "sft_lr": 1e-4},
        **{"opro_steps": 200, "opro_per_step": 8, "opro_shown": 20},
        **{"opro_threshold": 0.3, "opro_exemplars": 3, "opro_train": 261},
        **{"textgrad_epochs": 3, "textgrad_updates": 4, "textgrad_batch": 3, "textgrad_short_value": 10},
        **{"gepa_batch": 3, "gepa_calls": 150},
    }
