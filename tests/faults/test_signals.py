"""SIGTERM and SIGUSR1 in any phase: all ranks save the same step within 30 s, and the run can be resumed."""

import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.faults.runs import Event, RunResult, curves, games, signal_in, tensors

pytestmark = pytest.mark.faults

SECONDS = 30


def without_calls(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Remove env metrics: the calls of a step that was cancelled are counted by the run that made them."""
    return [{name: value for name, value in line.items() if not name.startswith("env/")} for line in lines]


def seconds_to_stop(result: RunResult) -> float:
    """Seconds from the signal to the end of the last rank."""
    return result.ended - result.signalled


MOMENTS = [
    ("rollout", signal.SIGTERM, (0, 1), 1),
    ("backward", signal.SIGUSR1, (1,), 2),  # only one rank gets it
    ("validation", signal.SIGTERM, (0, 1), 2),
    ("save", signal.SIGUSR1, (0, 1), 2),
]


@pytest.fixture(scope="module")
def undisturbed(launcher, arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert launcher.run(folder, arguments).codes == [0, 0]
    return folder / "run"


@pytest.mark.parametrize(("phase", "number", "targets", "times"), MOMENTS, ids=[name for name, *_ in MOMENTS])
def test_all_ranks_save_the_same_step_and_the_resumed_run_ends_like_an_undisturbed_one(
    launcher, arguments, undisturbed, tmp_path, phase, number, targets, times
):
    on_event = signal_in(phase, times=times, rank=targets[0], targets=targets, number=number)
    result = launcher.run(tmp_path, arguments, on_event=on_event)
    log = (tmp_path / "rank0.log").read_text()
    assert result.codes == [75, 75], log
    assert seconds_to_stop(result) < SECONDS and f"{number.name} was received; stopped after step" in log
    assert launcher.run(tmp_path, arguments).codes == [0, 0]
    run = tmp_path / "run"
    assert tensors(run) == tensors(undisturbed) and games(run) == games(undisturbed)
    assert without_calls(curves(run)) == without_calls(curves(undisturbed))


def test_a_second_signal_while_saving_changes_nothing(launcher, arguments, tmp_path):
    term = {"number": signal.SIGTERM}
    pending = [signal_in("rollout", times=2, **term), signal_in("save", **term)]  # the save before the exit

    def on_event(event: Event, processes: list[int]) -> bool:
        if pending[0](event, processes):
            pending.pop(0)
        return not pending

    result = launcher.run(tmp_path, arguments, on_event=on_event)
    assert result.codes == [75, 75] and not pending
    assert launcher.run(tmp_path, arguments).codes == [0, 0]


@pytest.fixture
def silent() -> Iterator[str]:
    """An endpoint that accepts every call and answers none."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        yield f"mini@http://127.0.0.1:{server.getsockname()[1]}/v1"


def test_calls_without_an_answer_do_not_delay_the_stop(launcher, arguments, silent, tmp_path):
    arguments = [*arguments, "--env", silent]
    begin = time.monotonic()
    result = launcher.run(tmp_path, arguments, on_event=signal_in("rollout", delay=3, number=signal.SIGTERM))
    log = (tmp_path / "rank0.log").read_text()
    assert result.codes == [75, 75], log
    assert seconds_to_stop(result) < SECONDS and time.monotonic() - begin < 120
    assert (tmp_path / "run/checkpoints/step-000000/manifest.json").exists()
