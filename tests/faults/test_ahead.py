"""`--ahead 1` on several ranks: kills, signals and another number of ranks."""

import re
import signal
from pathlib import Path

import pytest

from prompt_r1.storage.run_log import read_metrics
from tests.faults.harness import games_of, metrics_of, paid_calls, saved_tensors, signal_at

pytestmark = pytest.mark.faults

# The engine's last bits depend on which games decode together, and calls that a stop cut off count elsewhere.
IGNORED = ("engine/logprob_gap", "env/", "ahead/")


@pytest.fixture(scope="module")
def ahead(arguments) -> list[str]:
    """Games overlap with the updates of steps 1, 2 and 4."""
    return [*arguments, "--ahead", "1", "--val-every", "3", "--save-every", "3"]


@pytest.fixture(scope="module")
def uninterrupted(harness, ahead, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert harness.run(folder, ahead).exit_codes == [0, 0], (folder / "rank0.log").read_text()
    return folder / "run"


def check_same_run(run: Path, reference: Path) -> None:
    assert saved_tensors(run) == saved_tensors(reference)
    assert games_of(run) == games_of(reference)
    assert reproducible_metrics(run) == reproducible_metrics(reference)


def reproducible_metrics(run: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in line.items() if not name.startswith(IGNORED)}
        for line in metrics_of(run)
    ]


@pytest.mark.parametrize(
    ("phase", "occurrence", "targets"),
    [
        ("rollout", 2, (0, 1)),
        ("backward", 3, (1,)),
        ("step", 4, (0,)),
        ("save", 3, (0, 1)),
    ],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(
    harness, ahead, uninterrupted, tmp_path, phase, occurrence, targets
):
    kill = signal_at(phase, occurrence=occurrence, rank=targets[0], targets=targets)
    assert -9 in harness.run(tmp_path, ahead, fault=kill).exit_codes
    assert harness.run(tmp_path, ahead).exit_codes == [0, 0], (tmp_path / "rank0.log").read_text()
    check_same_run(tmp_path / "run", uninterrupted)
    calls, expected = paid_calls(tmp_path / "run"), paid_calls(uninterrupted)
    assert calls.keys() == expected.keys() and all(calls[key] <= expected[key] for key in calls)


@pytest.mark.parametrize(
    ("phase", "number", "targets"),
    [("rollout", signal.SIGTERM, (0, 1)), ("backward", signal.SIGUSR1, (1,)), ("step", signal.SIGTERM, (0,))],
)
def test_after_a_signal_all_ranks_save_one_step_and_the_run_can_be_resumed(
    harness, ahead, uninterrupted, tmp_path, phase, number, targets
):
    """The games that were in flight are played again, with the weights of the saved step."""
    fault = signal_at(phase, occurrence=3, rank=targets[0], targets=targets, number=number)
    stopped = harness.run(tmp_path, ahead, fault=fault)
    log = (tmp_path / "rank0.log").read_text()
    assert stopped.exit_codes == [75, 75] and stopped.seconds_after_fault < 30, log
    said = re.search(rf"{number.name} was received; stopped after step ([1-4])", log)
    assert said, log
    assert harness.run(tmp_path, ahead).exit_codes == [0, 0]
    lines, expected = reproducible_metrics(tmp_path / "run"), reproducible_metrics(uninterrupted)
    saved = int(said[1]) + 1
    assert lines[:saved] == expected[:saved] and len(lines) == len(expected)


@pytest.mark.parametrize(("parallel", "ranks"), [("fsdp", 1), ("fsdp", 2), ("ddp", 1)])
def test_a_run_resumes_on_another_number_of_ranks(harness, ahead, uninterrupted, tmp_path, parallel, ranks):
    """The same games and losses, up to the order of sums: no games are in flight at a checkpoint."""
    kill = signal_at("save", occurrence=3, targets=(0, 1))
    killed = harness.run(tmp_path, [*ahead, "--parallel", parallel], fault=kill)
    assert killed.exit_codes == [-9, -9]
    after = "none" if ranks == 1 else "ddp"
    resumed = harness.run(tmp_path, [*ahead, "--parallel", after], ranks=ranks)
    assert resumed.exit_codes == [0] * ranks, (tmp_path / "rank0.log").read_text()
    names = "step loss kl grad_norm reward/mean tokens/sampled engine/staleness val/reward".split()
    lines = zip(read_metrics(tmp_path / "run"), read_metrics(uninterrupted), strict=True)
    for got, want in lines:
        for name in names:
            expected = pytest.approx(want.get(name, 0), rel=1e-3, abs=1e-5)
            assert got.get(name, 0) == expected, (got["step"], name)
