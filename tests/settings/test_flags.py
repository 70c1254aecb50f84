"""Flags: what --help shows, and how their values are read."""

import re

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.settings import InferConfig
from prompt_r1.programs.command_line import read_settings
from prompt_r1.settings.fields import settings_of
from prompt_r1.settings.train import TrainConfig
from tests.support.programs import PROGRAMS
from tests.support.settings import train_config


def help_of(arguments: list[str], capsys) -> dict[str, str]:
    """The help of each flag of train.py, on one line."""
    with pytest.raises(SystemExit) as left:
        train_config(arguments)
    assert left.value.code == 0
    text = capsys.readouterr().out
    entries = re.split(r"\n  (?=--)", text)[1:]
    return {entry.split()[0]: " ".join(entry.split("\n\n")[0].split()) for entry in entries}


def test_a_flag_is_shown_with_its_form_choices_and_defaults(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py"])
    shown = help_of(["--help-all"], capsys)
    assert shown["--lr"] == "--lr X learning rate of AdamW, constant (0.0005; small: 3e-05; paper: 1e-06)"
    assert shown["--checkpointing"].startswith(
        "--checkpointing [true|false] gradient checkpointing (false; paper: true)"
    )
    assert shown["--help-all"] == f"--help-all show all {len(settings_of(TrainConfig))} flags"
    assert len(shown) == len(settings_of(TrainConfig)) + 2


def test_a_tuple_collects_every_value_and_a_boolean_takes_true_or_false():
    config = train_config("--data a.jsonl b.jsonl --data c.jsonl --checkpointing true".split())
    assert config.data == ("a.jsonl", "b.jsonl", "c.jsonl")
    assert config.checkpointing is True and train_config([]).checkpointing is False
    with pytest.raises(UsageError, match=r"--checkpointing .*true or false, not 'yes'"):
        train_config(["--checkpointing", "yes"])


@pytest.mark.parametrize(
    ("program", "kind"),
    [("train.py", TrainConfig), ("infer.py", InferConfig), ("evaluate.py", EvaluateConfig)],
)
def test_help_fits_one_screen_and_help_all_has_every_flag(program, kind, monkeypatch, capsys):
    shown = {}
    for flag in ("--help", "--help-all"):
        monkeypatch.setattr("sys.argv", [program, flag])
        with pytest.raises(SystemExit) as left:
            read_settings(PROGRAMS[program][0])
        assert left.value.code == 0
        shown[flag] = capsys.readouterr().out
    lines = shown["--help"].splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 80 and "--help-all" in shown["--help"]
    for setting in settings_of(kind):
        line = re.compile(f"^  {setting.flag}( |$)", re.MULTILINE)
        assert line.search(shown["--help-all"])
        assert bool(line.search(shown["--help"])) == setting.everyday


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--step", "--steps"),
        ("--kl", "--kl-coef"),
        ("--max-turn", "--max-turns"),
        ("--conifg", "--config"),
        ("--weight-dekay", "--weight-decay"),
        ("--learning", None),
        ("--foo", None),
    ],
)
def test_a_flag_that_does_not_exist_brings_the_one_that_was_meant(typed, meant):
    with pytest.raises(UsageError) as refused:
        train_config([typed, "1"])
    assert f"there is no flag {typed}" in str(refused.value)
    assert ("did you mean" in str(refused.value)) == bool(meant)
    assert meant is None or f"did you mean {meant}?" in str(refused.value)


@pytest.mark.parametrize("value", ["-1", "-.5"])
def test_a_negative_number_is_a_value_and_no_flag(value):
    with pytest.raises(UsageError, match="--lr must be at least 1e-12, not -"):
        train_config(["--lr", value])
