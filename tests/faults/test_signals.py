"""SIGTERM, SIGUSR1 and Ctrl-C at any moment: all ranks save one step within 30 s; the run can be resumed."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.fault_harness import Fault, games_of, metrics_of, saved_tensors

pytestmark = pytest.mark.faults

SECONDS = 30


def without_calls(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Leave out the counts of calls: a step abandoned after its games had counted theirs before the stop."""
    return [{name: value for name, value in line.items() if not name.startswith("env/")} for line in lines]


# Phase, signal, ranks that receive it, occurrence of the phase.
SIGNALS = [
    ("rollout", signal.SIGTERM, (0, 1), 1),
    ("backward", signal.SIGINT, (1,), 2),  # only one of the ranks receives it
    ("save", signal.SIGUSR1, (0, 1), 2),
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
