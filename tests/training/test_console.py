"""What a training shows: rows under their labels, a progress line that is alive, a summary that is true."""

import asyncio
import fcntl
import json
import os
import re
import struct
import termios
import time
from contextlib import contextmanager, redirect_stderr
from dataclasses import fields

import pytest

from infer import InferConfig
from prompt_r1.cli.command_line import run, train_config
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.train import TrainConfig
from prompt_r1.storage.run_log import Clock, Log
from prompt_r1.training.console import COLUMNS, Console, beside_bar, header, row, summary

STEP = {
    "step": 12, "reward/mean": 0.5, "em": 0.25, "format": 1.0, "turns": 2.5, "kl": 0.0123, "games/s": 40.0,
    "env/usd": 1.5, "val/em": 0.75, "val/reward": -0.25, "val/format": 0.5, "time/rollout": 60.0,
}  # fmt: skip


@pytest.mark.parametrize("priced", [False, True])
def test_every_number_ends_where_its_label_ends(priced):
    labels, numbers = header(priced=priced), row(STEP, priced=priced)
    ends = [[match.end() for match in re.finditer(r"[^\s|:]+", text.replace("validation", " " * 10))]
            for text in (labels, numbers)]  # fmt: skip
    assert ends[0] == ends[1] and len(ends[0]) == 1 + len(COLUMNS) + 3 + priced
    assert labels.index("|") == numbers.index("|")


def test_a_step_without_games_leaves_its_cells_blank():
    assert row({"step": 0, "val/em": 0.5, "val/reward": 0.5, "val/format": 1.0}, priced=False).split() == [
        "0", "|", "0.500", "0.500", "1.000"]  # fmt: skip


@contextmanager
def terminal():
    """A pseudo-terminal of 120 columns in the place of stderr; call it for what it has shown."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w", encoding="utf-8") as stream, redirect_stderr(stream):
        yield lambda: os.read(ours, 65536).decode()
    os.close(ours)


def test_the_progress_line_tells_phase_games_and_the_newest_numbers(tmp_path):
    console = Console(Log(tmp_path, quiet=False), steps=20, priced=True)
    clock = Clock(console.phase)

    async def play(question: str) -> str:
        return question

    with terminal() as shown_by, console.bar(18):
        for step in (19, 20):
            with clock.phase("rollout"):
                assert asyncio.run(console.counted(play, 5)("Who?")) == "Who?"
                time.sleep(0.11)  # it is drawn ten times a second
                asyncio.run(console.counted(play, 5)("Why?"))
            console.row({**STEP, "step": step})
            console.at(step)
        shown = shown_by()
    assert "rollout 1/5" in shown and "step 19/20" in shown and "left" in shown
    assert beside_bar(STEP, priced=True) in shown and "\n" not in shown
    assert beside_bar(STEP, priced=True) == "reward 0.50  EM 0.25  format 1.00  KL 0.01  $1.50  40.0 games/s"


def test_the_summary_tells_the_first_validation_that_of_the_kept_agent_and_the_cost(tmp_path):
    lines = [{"step": 0, "val/em": 0.1, "val/reward": 0.2, "val/format": 0.9, "time/validation": 30.0}]
    lines += [
        {"step": n, "em": n / 10, "reward/mean": n / 20, "format": 1.0, "games": 8.0, "env/paid": 9.0,
         "env/usd": n * 0.25, "time/rollout": 60.0} for n in range(1, 11)
    ]  # fmt: skip
    lines[6] |= {"val/em": 0.8, "val/reward": 0.7, "val/format": 1.0}
    lines[10] |= {"val/em": 0.3, "val/reward": 0.7, "val/format": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = summary(tmp_path, 6, TrainConfig(env="gpt-4o-mini", test_data=("test.jsonl",)))
    assert (
        "EM 0.100 → 0.800   reward 0.200 → 0.700   format 0.900 → 1.000   (step 0 → step 6, the best)" in told
    )
    assert "EM 0.300 → 0.800   reward 0.150 → 0.400   format 1.000 → 1.000" in told  # steps 1-5, 6-10
    assert "10 steps, 80 games, 90 calls of gpt-4o-mini, $2.50, 10 min" in told
    assert f"python infer.py --agent {tmp_path}\n" in told
    assert f"python evaluate.py --agent {tmp_path} --data test.jsonl" in told


@pytest.mark.parametrize(
    ("program", "kind"),
    [("train.py", TrainConfig), ("infer.py", InferConfig), ("evaluate.py", EvaluateConfig)],
)
def test_the_everyday_help_fits_one_screen_and_help_all_has_every_flag(program, kind, monkeypatch, capsys):
    import evaluate
    import infer
    import train

    main = {"train.py": train.main, "infer.py": infer.main, "evaluate.py": evaluate.main}[program]
    told = {}
    for flag in ("--help", "--help-all"):
        monkeypatch.setattr("sys.argv", [program, flag])
        with pytest.raises(SystemExit) as left:
            run(main)
        assert left.value.code == 0
        told[flag] = capsys.readouterr().out
    lines = told["--help"].splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100 and "--help-all" in told["--help"]
    for field in fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        assert f"  {flag} " in told["--help-all"].replace("\n", " \n")
        assert (f"  {flag} " in told["--help"].replace("\n", " \n")) == (field.name in kind.EVERYDAY)


def test_a_flag_that_the_short_help_hides_works_all_the_same():
    assert train_config(["--grad-clip", "2.5"])[0].grad_clip == 2.5
