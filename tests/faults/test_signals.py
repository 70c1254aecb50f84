"""Signals at any moment: all ranks save one step within 30 s, and the run can be resumed."""

import fcntl
import os
import re
import signal
import subprocess
import termios
import time
from functools import partial
from pathlib import Path

import pytest

from prompt_r1.training.log import read_metrics
from prompt_r1.training.run_folder import checkpoints_of
from tests.support.fault_harness import Fault, games_of, metrics_of, saved_tensors
from tests.support.programs import command

pytestmark = pytest.mark.faults

SECONDS = 30


def without_calls(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Leave out the counts of calls: a step abandoned after its games had counted theirs before the stop."""
    return [{name: value for name, value in line.items() if not name.startswith("env/")} for line in lines]


# Phase, signal, ranks that receive it, occurrence of the phase.
SIGNALS = [
    ("rollout", signal.SIGTERM, (0, 1), 1),
    ("backward", signal.SIGINT, (1,), 2),  # only one of the ranks receives it
    ("save", signal.SIGUSR2, (0, 1), 2),
]


@pytest.fixture(scope="module")
def arguments(arguments: list[str]) -> list[str]:
    """Not every step validates: there, only the end of the step tells the other ranks of a signal."""
    return [*arguments, "--save-every", "2"]


@pytest.fixture(scope="module")
def uninterrupted(harness, arguments, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert harness.run(folder, arguments).exit_codes == [0, 0]
    return folder / "run"


@pytest.mark.parametrize(
    ("phase", "number", "targets", "occurrence"), SIGNALS, ids=[phase for phase, *_ in SIGNALS]
)
def test_after_a_signal_all_ranks_save_one_step_and_the_resumed_run_ends_like_an_uninterrupted_one(
    harness, arguments, uninterrupted, tmp_path, phase, number, targets, occurrence
):
    fault = Fault(phase, occurrence=occurrence, rank=targets[0], targets=targets, number=number)
    stopped = harness.run(tmp_path, arguments, fault=fault)
    log = (tmp_path / "rank0.log").read_text()
    assert stopped.exit_codes == [130 if number == signal.SIGINT else 75] * 2, log
    assert stopped.seconds_after_fault < SECONDS
    assert re.search(rf"{number.name} was received; stopped after step \d+,", log)
    assert harness.run(tmp_path, arguments).exit_codes == [0, 0]
    run = tmp_path / "run"
    assert saved_tensors(run) == saved_tensors(uninterrupted)
    assert games_of(run) == games_of(uninterrupted)
    assert without_calls(metrics_of(run)) == without_calls(metrics_of(uninterrupted))


def test_calls_without_a_response_do_not_delay_the_stop(harness, arguments, unresponsive_endpoint, tmp_path):
    begin = time.monotonic()
    terminate = Fault("rollout", delay=3, number=signal.SIGTERM)
    stopped = harness.run(tmp_path, [*arguments, "--env", unresponsive_endpoint], fault=terminate)
    log = (tmp_path / "rank0.log").read_text()
    assert stopped.exit_codes == [75, 75], log
    assert stopped.seconds_after_fault < SECONDS and time.monotonic() - begin < 120
    assert (tmp_path / "run/checkpoints/step-000000/manifest.json").exists()


def test_a_terminal_that_closes_saves_the_run(harness, arguments, tmp_path):
    """SIGHUP lost the steps since the last checkpoint; and the program cannot print why it stops."""
    arguments = [*arguments, "--save-every", "99", "--steps", "50"]
    terminal, program_side = os.openpty()
    take_terminal = partial(fcntl.ioctl, program_side, termios.TIOCSCTTY, 0)
    with subprocess.Popen(
        command("train.py", *arguments),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=program_side,
        stdout=program_side,
        stderr=program_side,
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as run:
        os.close(program_side)
        while len(read_metrics(tmp_path / "run")) < 3:
            os.read(terminal, 2**16)  # a terminal that nobody reads blocks the program
        os.close(terminal)
        assert run.wait(SECONDS) == 75
    logged = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert checkpoints_of(tmp_path / "run")[-1].name == f"step-{int(logged[-1]):06d}"
