"""Each setting of each program, given twice: both values arrive in the config that the program runs with."""

import sys
from pathlib import Path
from typing import Any

import pytest

from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.settings import InferConfig
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.settings.fields import Setting, read_yaml, settings_of, write_yaml
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.settings import FineTuningConfig
from tests.support import tiny
from tests.support.programs import PROGRAMS

CONFIGS: dict[str, type[Any]] = {
    "train.py": TrainConfig,
    "infer.py": InferConfig,
    "evaluate.py": EvaluateConfig,
    "warm_start.py": FineTuningConfig,
}
CODE = """
def ends(game, paper):
    return 1.0


def asks(game, paper):
    return float(len(game.turns))


def length(answer, question):
    return float(len(answer))


def words(answer, question):
    return float(len(answer.split()))


def kept(games):
    return [game.advantage for game in games]


def halved(games):
    return [game.advantage / 2 for game in games]
"""
# Two values of each setting that takes a text. AGENT and OTHER are folders of agents, own.jsonl is a file.
TEXTS = {
    "agent": ("AGENT", "OTHER"),
    "env": ("mini-b", "mini-mute"),
    "data": ("own.jsonl", "mini:validation mini:ood"),
    "val_data": ("own.jsonl", "mini:ood own.jsonl"),
    "test_data": ("own.jsonl", "mini:ood own.jsonl"),
    "train_data": ("own.jsonl", "mini own.jsonl"),
    "out": ("first", "second/folder"),
    "env_args": ('{"temperature": 0.7}', "{}"),
    "route": ("uniform", "session"),
    "env_system": ("Be brief.", ""),
    "env_price": ("1,2", "3,4"),
    "reward": ("code_of_user:ends", "code_of_user:asks"),
    "loss_function": ("examples.losses:gspo", "examples.losses:cispo"),
    "advantage_function": ("code_of_user:kept", "code_of_user:halved"),
    "device": ("cpu", "auto"),
    "method": ("direct", "cot untrained"),
    "ssim_model": ("AGENT", "OTHER"),
    "optimizer_env": ("mini", "mini-b"),
    "grpo_agent": ("AGENT", "OTHER"),
    "metric": ("code_of_user:length", "code_of_user:words code_of_user:length"),
    "question": ("Who?", "When?"),
    "games": ("mini", "mini:pop"),
}
# What else a setting needs.
BESIDE = {
    "--skip-no-spread": "--kl-coef 0",
    "--max-env-usd": '--env-price 1,1 --env-args {"max_tokens":9}',
    "--route": "--env mini,mini-b",
    "--offload": "--parallel fsdp",
}


def two_values(setting: Setting, default: Any) -> tuple[str, str]:
    """Two values of a setting, the first of them not its default, as one types them."""
    if setting.choices and not setting.takes_several:
        others = [choice for choice in setting.choices if choice != default]
        return others[0], default
    if setting.kind is bool:
        return ("false", "true") if default else ("true", "false")
    if setting.kind in (int, float):
        default = 0 if default is None else default
        step = 1 if setting.kind is int else 0.125
        near = [default + step, default + 2 * step, default - step, default - 2 * step]
        first, second = [value for value in near if setting.low <= value <= setting.high][:2]
        return str(first), str(second)
    assert setting.name in TEXTS, f"TEXTS needs two values of the new setting {setting.name}"
    return TEXTS[setting.name]


def typed(setting: Setting, text: str) -> Any:
    """The value that a program has after `text` was typed."""
    if setting.takes_several:
        return tuple(text.split())
    return text == "true" if setting.kind is bool else setting.kind(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two agents, a file of questions and a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "code_of_user", raising=False)
    (tmp_path / "code_of_user.py").write_text(CODE)
    (tmp_path / "wandb.py").touch()  # --wandb needs it
    for name in ("AGENT", "OTHER"):
        tiny.save_agent(tmp_path / name)
    (tmp_path / "own.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n')
    return tmp_path


def config_of(program: str, arguments: list[str]) -> Any:
    """The config that a program makes of its arguments."""
    read, _ = PROGRAMS[program]
    return read(arguments) if program == "warm_start.py" else read(arguments).config


@pytest.mark.parametrize("program", CONFIGS)
def test_both_values_of_each_setting_arrive(program: str, folder: Path) -> None:
    needed = {"train.py": "", "warm_start.py": "--games mini --agent AGENT"}.get(
        program, "--agent AGENT --env mini"
    )
    default = config_of(program, needed.split())
    for setting in settings_of(CONFIGS[program]):
        flag = setting.flag
        beside = [*needed.split(), *BESIDE.get(flag, "").split()]
        if flag in beside:
            place = beside.index(flag)
            del beside[place : place + 2]
        for text in two_values(setting, getattr(default, setting.name)):
            words = text.split() if setting.takes_several else [text]
            config = config_of(program, [*beside, flag, *words])
            assert getattr(config, setting.name) == typed(setting, text), (flag, text)


def test_both_values_of_each_setting_of_a_file_arrive(folder: Path) -> None:
    """A run reads its own config.yaml when it is resumed, and --config reads any other file."""
    for kind in (TrainConfig, AgentConfig):
        default = kind()
        for setting in settings_of(kind):
            for text in two_values(setting, getattr(default, setting.name)):
                value = typed(setting, text)
                write_yaml(kind(**{setting.name: value}), folder / "config.yaml")
                assert read_yaml(folder / "config.yaml", kind)[setting.name] == value, setting.name
