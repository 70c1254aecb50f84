"""SIGTERM and SIGUSR1 at any moment: one common step is saved, within 30 s, and the run goes on."""

import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.faults.lives import Event, Life, curves, games, striker, tensors

pytestmark = pytest.mark.faults

SECONDS = 30


def without_calls(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """A step that was abandoned after its games counts their calls in the life that played them."""
    return [{name: value for name, value in line.items() if not name.startswith("env/")} for line in lines]


def times_of(life: Life) -> float:
    """Seconds from the signal to the end of the last rank."""
    return life.over - life.struck


MOMENTS = [
    ("rollout", signal.SIGTERM, (0, 1), 1),
    ("backward", signal.SIGUSR1, (1,), 2),  # only one rank is told
    ("validation", signal.SIGTERM, (0, 1), 2),
    ("save", signal.SIGUSR1, (0, 1), 2),
]


@pytest.fixture(scope="module")
def undisturbed(nurse, line, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert nurse.live(folder, line).codes == [0, 0]
    return folder / "run"


@pytest.mark.parametrize(("phase", "number", "victims", "times"), MOMENTS, ids=[name for name, *_ in MOMENTS])
def test_a_signal_saves_a_common_step_and_the_run_ends_as_if_undisturbed(
    nurse, line, undisturbed, tmp_path, phase, number, victims, times
):
    strike = striker(phase, times=times, rank=victims[0], victims=victims, number=number)
    life = nurse.live(tmp_path, line, strike=strike)
    log = (tmp_path / "rank0.log").read_text()
    assert life.codes == [75, 75], log
    assert times_of(life) < SECONDS and f"{number.name} was received; stopped after step" in log
    assert nurse.live(tmp_path, line).codes == [0, 0]
    run = tmp_path / "run"
    assert tensors(run) == tensors(undisturbed) and games(run) == games(undisturbed)
    assert without_calls(curves(run)) == without_calls(curves(undisturbed))


def test_a_second_signal_while_saving_changes_nothing(nurse, line, tmp_path):
    term = {"number": signal.SIGTERM}
    pending = [striker("rollout", times=2, **term), striker("save", **term)]  # the save on the way out

    def strike(event: Event, processes: list[int]) -> bool:
        if pending[0](event, processes):
            pending.pop(0)
        return not pending

    life = nurse.live(tmp_path, line, strike=strike)
    assert life.codes == [75, 75] and not pending
    assert nurse.live(tmp_path, line).codes == [0, 0]


@pytest.fixture
def silent() -> Iterator[str]:
    """An endpoint that takes every call and answers none."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        yield f"mini@http://127.0.0.1:{server.getsockname()[1]}/v1"


def test_calls_that_are_never_answered_do_not_hold_the_run(nurse, line, silent, tmp_path):
    arguments = [*line, "--env", silent]
    begin = time.monotonic()
    life = nurse.live(tmp_path, arguments, strike=striker("rollout", delay=3, number=signal.SIGTERM))
    log = (tmp_path / "rank0.log").read_text()
    assert life.codes == [75, 75], log
    assert times_of(life) < SECONDS and time.monotonic() - begin < 120
    assert (tmp_path / "run/checkpoints/step-000000/manifest.json").exists()
