"""The log of a run: metric lines, times by phase, messages on the console."""

import math
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO
from unittest.mock import Mock

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.model.distributed import Ranks
from prompt_r1.programs import folders
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.checkpoint import State
from prompt_r1.training.log import Log, read_metrics
from prompt_r1.training.resume import trim_run
from prompt_r1.training.run_folder import TEST_FILE
from prompt_r1.training.start import open_log
from tests.support.paths import ROOT
from tests.support.thread_ranks import on_each_rank

VALIDATED = State({"step": 2, "val/n": 4})


def test_a_message_cannot_move_the_cursor(tmp_path, capsys):
    Log(tmp_path).say("reply \x1b[2J\x1b]0;owned\a \u202eabc\r\x9b")
    assert capsys.readouterr() == ("reply \\x1b[2J\\x1b]0;owned\\x07 \\u202eabc\\r\\x9b\n", "")


def test_the_log_of_another_rank_prints_nothing_and_writes_no_metrics(tmp_path, capsys):
    log = Log(tmp_path, rank=1)
    log.say("hello")
    assert log.write_metrics({"step": 1, "em": 0.12345678}) == {"step": 1, "em": 0.123457}
    assert capsys.readouterr() == ("", "") and read_metrics(tmp_path) == []


def test_metrics_are_rounded_to_six_digits_and_integers_are_kept(tmp_path):
    log = Log(tmp_path)
    log.write_metrics({"step": 1234567, "em": 0.12345678})
    log.write_metrics({"step": 1234568, "lr": 1e-7})
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert lines == '{"step":1234567,"em":0.123457}\n{"step":1234568,"lr":1e-07}\n'


def test_damaged_metric_lines_are_skipped_and_nan_is_kept(tmp_path):
    good = '{"step": 1, "em": 0.5, "loss": NaN}'
    damaged = ["[]", "7", '{"em": 1}', "{" * 100_000, '{"step": 2, "em"', "\x00\u2028", ""]
    (tmp_path / "metrics.jsonl").write_text("\n".join([good, *damaged]))
    [line] = read_metrics(tmp_path)
    assert line["em"] == 0.5 and math.isnan(line["loss"])


def test_metric_lines_from_the_step_of_the_checkpoint_on_and_incomplete_ones_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'[1]\n{"step": 0}\n\xff\n{"step": 1, "em": 0.5}\n{"step": 2}\n{"step": 3, "r')
    trim_run(tmp_path, VALIDATED)
    assert path.read_text() == '{"step":0}\n{"step":1,"em":0.5}\n'


@pytest.mark.parametrize("state", [VALIDATED, State({"step": 2})])
def test_the_games_of_later_steps_are_removed_whatever_rank_played_them(state, tmp_path):
    """Also after a resume on one rank in place of two: those of rank 1."""
    folder = tmp_path / "trajectories"
    folder.mkdir()
    kept = ["step-000002-rank0", "step-000002-rank1", "validation-000000-rank0", "own"]
    removed = ["step-000003-rank1", "validation-000003-rank0", "test-trained-rank1"]
    # A bug: games of an interrupted validation stayed beside those that were played again.
    (kept if state is VALIDATED else removed).append("validation-000002-rank1")
    for name in (*kept, *removed):
        (folder / f"{name}.jsonl").touch()
    trim_run(tmp_path, state)
    assert sorted(path.stem for path in folder.iterdir()) == sorted(kept)


def test_a_run_that_goes_on_after_its_test_no_longer_shows_the_test_of_the_earlier_agent(tmp_path):
    """A bug: the reports of a finished run that got more --steps had the old table beside the new curves."""
    (tmp_path / TEST_FILE).write_text("| trained agent | 0.5 |")
    trim_run(tmp_path, VALIDATED)
    assert not (tmp_path / TEST_FILE).exists()


def test_the_seconds_of_a_phase_add_up_until_they_are_logged(tmp_path):
    log = Log(tmp_path)
    log.seconds["rollout"] = 100.0
    with log.phase("rollout"):
        pass
    first = log.seconds["rollout"]
    with log.phase("rollout"):
        pass
    assert 100 < first < log.seconds["rollout"] < 101 and log._bar.desc == "rollout"
    assert 100 <= log.write_metrics({"step": 1})["time/rollout"] < 101
    assert log.write_metrics({"step": 2}) == {"step": 2}


def test_a_run_folder_that_is_deleted_during_the_run_is_named_and_not_made_again(tmp_path):
    """The run went on in a new folder, and ended with "there is no metrics.jsonl"."""
    folder = tmp_path / "run"
    folder.mkdir()
    log = Log(folder)
    folder.rmdir()
    for write in (lambda: log.write_metrics({"step": 1}), lambda: log.write_games("step-000001", [])):
        with pytest.raises(FileNotFoundError):
            write()
    with pytest.raises(FileNotFoundError):
        folders.begin_folder(folder / "checkpoints/step-000001")
    assert not folder.exists()


@pytest.fixture
def wandb(monkeypatch) -> ModuleType:
    """A stand-in for the package wandb. A test gives it the `init` that it needs."""
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.Error = type("Error", (Exception,), {})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_missing_account_of_wandb_is_reported_on_every_rank(tmp_path, wandb):
    """Only the first rank raised the error. The others waited for it, and said that the run resumes."""
    wandb.init = Mock(side_effect=wandb.Error("no API key"))

    def open_on(ranks: Ranks) -> None:
        with pytest.raises(UsageError, match="--wandb: no API key; log in"):
            open_log(TrainConfig(wandb=True), tmp_path, ranks, games=1)

    on_each_rank(2, open_on)


def test_wandb_gets_each_line_and_a_resumed_run_continues_the_same_run(tmp_path, wandb):
    logged: list[tuple[str, int, float]] = []

    def init(*, id: str, **settings: str) -> SimpleNamespace:
        assert settings["resume"] == "allow"
        log = lambda metrics, step: logged.append((id, step, metrics["em"]))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda: None)

    wandb.init = init
    for steps in ([0, 1], [2]):  # the second time resumed
        log = Log(tmp_path, wandb=True)
        for step in steps:
            log.write_metrics({"step": step, "em": 0.5})
        log.close()
    [identity] = {identity for identity, _, _ in logged}
    assert logged == [(identity, step, 0.5) for step in (0, 1, 2)]


LOGGING_PROGRAM = """
import sys
from pathlib import Path
from prompt_r1.programs.command_line import run_program
from prompt_r1.training.log import Log

def main(folder):
    log = Log(folder)
    for step in range(3):
        log.write_metrics({"step": step})

run_program(main, Path(sys.argv[1]))
"""


def log_three_steps(folder: Path, stdout: IO[bytes] | int) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", LOGGING_PROGRAM, str(folder)]
    return subprocess.run(line, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=50)


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path):
    """A bug: `python train.py | head -5` ended the run, and lost the steps since the last checkpoint."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = log_three_steps(tmp_path, write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_run_whose_output_is_a_file_on_a_full_disk_stops_at_the_first_message(tmp_path):
    """It must not go on as if it had written the message."""
    with open("/dev/full", "wb") as full:
        done = log_three_steps(tmp_path, full)
    assert done.returncode == 75 and "No space left on device" in done.stderr
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]
