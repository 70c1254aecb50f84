"""Presets, YAML files and flags: their precedence, and the values of the presets."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import make_dataclass

import pytest
import torch

from prompt_r1.environments.specs import open_environment
from prompt_r1.errors import UsageError
from prompt_r1.reward import RULE_WITHOUT_ENVIRONMENT
from prompt_r1.settings.agent import HELD_OUT, INSTRUCTION_WITHOUT_ENVIRONMENT, INSTRUCTIONS, AgentConfig
from prompt_r1.settings.fields import read_yaml, setting, settings_of, write_yaml
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.preflight import read_training, warnings_of
from prompt_r1.training.run import RunQuestions
from tests.support.settings import train_config


def test_flags_override_the_file_and_the_file_overrides_the_defaults(tmp_path):
    file = tmp_path / "own.yaml"
    data = "data: mine.jsonl\nval_data: [a.jsonl, b.jsonl]\ntest_data: c.jsonl\n"
    file.write_text(f"{data}lr: 2.0e-5\nsteps: 7\ncheckpointing: false\n")
    config = train_config(["--config", str(file), "--steps", "9"])
    assert (config.lr, config.steps, config.group_size, config.out) == (2e-5, 9, 5, "runs/own-seed0")
    assert config.val_data == ("a.jsonl", "b.jsonl") and config.test_data == ("c.jsonl",)
    assert config.checkpointing is False


def test_a_training_is_as_long_as_its_epochs_or_else_its_steps(tmp_path):
    file = tmp_path / "own.yaml"
    for text, flags, steps, epochs in [
        ("steps: 7", "", 7, 0),
        ("steps: 7", "--epochs 2", 7, 2),
        ("steps: 7\nepochs: 3", "", 7, 3),
        ("epochs: 3", "--steps 9 --epochs 0", 9, 0),
        ("steps: 7\nepochs: 0", "--steps 9", 9, 0),  # as in the config.yaml of a run
    ]:
        file.write_text(f"data: mini\n{text}\n")
        config = train_config(["--config", str(file), *flags.split()])
        assert (config.steps, config.epochs) == (steps, epochs)
    for flags in ("--steps 7 --epochs 2", "--steps 7"):
        file.write_text("data: mini\nepochs: 2\n")
        with pytest.raises(UsageError, match="--steps and --epochs"):
            train_config(["--config", str(file), *flags.split()])


def test_questions_of_the_mini_world_are_validated_and_tested_with_its_other_splits():
    config = train_config(["--config", "paper", "--data", "mini"])
    assert config.data == config.val_data == config.test_data == ("mini",)
    mixed = train_config(["--config", "paper", "--data", "mini", "mine.jsonl"])
    assert mixed.val_data == (HELD_OUT,) and not mixed.test_data, "a file has no other splits"


def test_validation_and_test_can_be_switched_off(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("data: mini\nenv: mini\ntest_data: none\n")
    for flags in ([], ["--config", str(file)]):
        config = train_config([*flags, "--val-data", "none", "--test-data", "none"])
        assert config.data and not config.val_data and not config.test_data
    assert not train_config(["--config", str(file)]).test_data


def test_a_config_that_is_written_reads_back_equal(tmp_path):
    for config in (TrainConfig(data=("ä.jsonl",), lr=1e-7), AgentConfig(env="mini")):
        write_yaml(config, tmp_path / "config.yaml")
        assert type(config)(**read_yaml(tmp_path / "config.yaml", type(config))) == config
    write_yaml(TrainConfig(data=("ä.jsonl",)), tmp_path / "config.yaml")
    assert "ä.jsonl" in (tmp_path / "config.yaml").read_text("utf-8"), "names stay readable"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps: true", "steps takes a whole number, not True"),
        ("lr: .nan", "lr must be at least 1e-12, not nan"),
        ("lr: [1e-6]", "lr takes a number"),
        ("checkpointing: 1", "checkpointing takes true or false, not 1"),
        ("agent: 4", "agent takes a text, not 4"),
        ("agent:", "agent takes a text, not None"),
        ("seed:", "seed takes a whole number, not None"),
        ("steps: !!int x", "is not YAML"),
        ("steps: !!python/object/apply:os.system [false]", "is not YAML"),
        ("data: {a: b}", "data takes a text, not {'a': 'b'}"),
    ],
    ids=lambda text: text[:40],
)
def test_an_error_in_a_config_file_names_the_key_and_the_value(tmp_path, text, sentence):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as refused:
        train_config(["--config", str(file), "--data", "mini"])
    assert sentence in str(refused.value) and str(file) in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_text_in_a_config_file_is_read_as_on_the_command_line(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("data: mini\nlr: 1e-6\nclip: 1\nsteps: '7'\ncheckpointing: 'false'\n")
    config = train_config(["--config", str(file)])
    assert (config.lr, config.clip, config.steps, config.checkpointing) == (1e-6, 1.0, 7, False)
    assert type(config.clip) is float


def test_the_settings_of_later_papers_are_off_and_can_stand_in_a_file(tmp_path):
    default = train_config([])
    assert (default.advantage, default.mask_truncated, default.skip_no_spread) == (
        "standardised",
        False,
        False,
    )
    file = tmp_path / "own.yaml"
    file.write_text(
        "data: mini\nadvantage: centred\nmask_truncated: true\nskip_no_spread: true\nkl_coef: 0\n"
    )
    config = train_config(["--config", str(file)])
    assert (config.advantage, config.mask_truncated, config.skip_no_spread) == ("centred", True, True)


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("reward: stranger:metric", "--reward stranger:metric"),
        ("loss_function: stranger:metric", "--loss-function stranger:metric"),
        ("advantage_function: stranger:metric", "--advantage-function stranger:metric"),
        ("env: mini, py:stranger:Oracle", "--env mini, py:stranger:Oracle"),
        ("data: ['py:stranger:rows']", "--data py:stranger:rows"),
        ("val_data: py:stranger:rows", "--val-data py:stranger:rows"),
        ("test_data: [mini, 'py:stranger:rows']", "--test-data mini py:stranger:rows"),
    ],
)
def test_code_is_imported_only_if_the_command_line_names_it(tmp_path, monkeypatch, line, flag):
    """A config file may come from a stranger."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stranger.py").write_text(
        "open('executed', 'w').close()\n\n\ndef metric(_, __=None, **settings):\n    return 1.0\n"
    )
    file = tmp_path / "foreign.yaml"
    file.write_text(f"{line}\n")
    with pytest.raises(UsageError, match=f"names code.*give {flag}$"):
        read_training(["--config", str(file)])
    assert not (tmp_path / "executed").exists()
    functions = [
        f"{name} stranger:metric" for name in ("--reward", "--loss-function", "--advantage-function")
    ]
    own = f"--env mini --data mini {' '.join(functions)} --val-data mini --test-data mini"
    assert read_training(["--config", str(file), *own.split()]).config.reward == "stranger:metric"
    assert (tmp_path / "executed").exists()
    sys.modules.pop("stranger")


STRANGE = ["stranger:rows", "py:stranger:rows", "mini,py:stranger:rows", ["mini", "py:stranger:rows"]]


@pytest.mark.parametrize("setting", settings_of(TrainConfig), ids=lambda setting: setting.name)
def test_no_setting_of_a_file_imports_code(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    (tmp_path / "stranger.py").touch()
    (tmp_path / "own.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n')
    sound = {"agent": "mini", "env": "mini", "data": "own.jsonl", "val_data": "none", "test_data": "none"}
    for value in STRANGE:
        lines = [f"{key}: {text}" for key, text in (sound | {setting.name: value}).items()]
        (tmp_path / "foreign.yaml").write_text("\n".join(lines))
        with suppress(UsageError):
            RunQuestions.read(read_training(["--config", "foreign.yaml"]).config)
        assert "stranger" not in sys.modules, value


def test_texts_for_a_model_name_no_code(tmp_path):
    """A bug: a system message that mentions py:x was refused, as if it were imported."""
    (tmp_path / "own.yaml").write_text("data: mini\nenv_system: Explain py:modules and py:x.\n")
    assert "py:x" in train_config(["--config", str(tmp_path / "own.yaml")]).env_system


@pytest.mark.parametrize("typed", ["", "m@http://gpu7/v1", "none"])
def test_an_environment_of_a_config_file_is_not_trusted(tmp_path, monkeypatch, typed):
    """The key is not sent to a URL that a file names: it may come from a stranger."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.yaml").write_text("agent: mini\ndata: mini\nenv: m@http://gpu7/v1\n")
    flags = ["--env", typed] if typed else []
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    chosen = read_training(["--config", "foreign.yaml", *flags])
    [client] = open_environment(chosen.environment, seed=0, device=torch.device("cpu")).clients
    assert getattr(client.source, "key", "") == ("sk-own" if typed == "m@http://gpu7/v1" else "")


def test_the_learning_rate_of_the_toy_agent_is_warned_of_with_any_other_agent():
    """A bug: `--config mini --agent REAL` kept 5e-4, and a model of 135 M parameters collapsed at step 2."""

    def warned(line: str) -> bool:
        return any("--lr 0.0005" in warning for warning in warnings_of(train_config(line.split())))

    assert warned("--config mini --agent real")
    assert not warned("") and not warned("--config mini --agent real --lr 3e-5")
    assert not warned("--config small") and not warned("--config paper --env mini --data mini")


@pytest.mark.parametrize(
    ("flags", "game"),
    [
        ("", (INSTRUCTIONS["short"], 48)),
        ("--instruction paper --max-new 99", (INSTRUCTION_WITHOUT_ENVIRONMENT, 99)),
        ("--config paper --data mini", (INSTRUCTION_WITHOUT_ENVIRONMENT, 8192)),
        ("--config paper --data mini --instruction answer", (INSTRUCTIONS["answer"], 8192)),
    ],
)
def test_without_an_environment_the_agent_is_told_to_answer_in_one_turn_as_long_as_a_game(flags, game):
    config = train_config(["--env", "none", *flags.split()])
    assert config.game.max_turns == 1 and config.base_rule is RULE_WITHOUT_ENVIRONMENT
    assert (config.instruction_text, config.game.max_new) == game


@pytest.mark.parametrize(
    ("flags", "folder", "toys"),
    [
        ("", "mini", ""),
        ("--steps 3 --agent mini --data mini", "mini", ""),
        ("--data a/mine.jsonl", "mini", "--agent mini, --env mini:"),
        ("--data mine.jsonl --env gpt-4o-mini@http://host/v1", "mini", "--agent mini:"),
        ("--agent org/Qwen3-0.6B", "mini", "--data mini, --env mini:"),
        ("--config small --agent org/Qwen3-0.6B", "small", "--data mini:pop, --env mini:"),
        ("--config paper --data mine.jsonl", "paper", ""),
    ],
)
def test_a_run_has_a_folder_of_its_config_and_toys_beside_real_parts_are_named(flags, folder, toys):
    config = train_config([*flags.split(), "--seed", "3"])
    assert config.out == f"runs/{folder}-seed3"
    assert (toys in "".join(warnings_of(config))) if toys else not "".join(warnings_of(config))


def test_ones_own_questions_are_held_out_in_part_and_never_validated_on_those_of_the_mini_world():
    def split(flags: str) -> tuple[Sequence[str], Sequence[str]]:
        config = train_config(["--data", "mine.jsonl", *flags.split()])
        return config.val_data, config.test_data

    assert split("") == split("--config paper") == (("held-out",), ())
    assert split("--val-data none --test-data b.jsonl") == ((), ("b.jsonl",))
    assert split("--val-data c.jsonl") == (("c.jsonl",), ())


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        ({}, ("0", "1e-9", "1e15"), ("-1", "-inf", "inf", "1e30", "nan")),
        ({"low": 2}, ("2",), ("1", "1.999")),
        ({"high": 1}, ("0", "1"), ("-0.001", "1.001")),
    ],
)
def test_a_range_includes_its_bounds(limits, inside, outside):
    config = make_dataclass("Config", [("number", float, setting(0.0, "", **limits))])
    [number] = settings_of(config)
    for value in inside:
        assert number.convert(value, "--x") == float(value)
    for value in outside:
        with pytest.raises(UsageError, match="--x must be "):
            number.convert(value, "--x")
