"""The help of the programs."""

import re
from dataclasses import fields

import pytest

from infer import InferConfig
from prompt_r1.cli.command_line import run_program
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.fields import flag_of
from prompt_r1.config.train import TrainConfig
from tests.support.programs import MAINS


@pytest.mark.parametrize(
    ("program", "kind"),
    [("train.py", TrainConfig), ("infer.py", InferConfig), ("evaluate.py", EvaluateConfig)],
)
def test_help_fits_one_screen_and_help_all_has_every_flag(program, kind, monkeypatch, capsys):
    shown = {}
    for flag in ("--help", "--help-all"):
        monkeypatch.setattr("sys.argv", [program, flag])
        with pytest.raises(SystemExit) as left:
            run_program(MAINS[program])
        assert left.value.code == 0
        shown[flag] = capsys.readouterr().out
    lines = shown["--help"].splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 80 and "--help-all" in shown["--help"]
    for field in fields(kind):
        line = re.compile(f"^  {flag_of(field.name)}( |$)", re.MULTILINE)
        assert line.search(shown["--help-all"])
        assert bool(line.search(shown["--help"])) == field.metadata["everyday"]
