"""SIGKILL at random moments: the resumed run ends like an undisturbed one. `python -m pytest -m faults`."""

import random
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from tests.faults.runs import RunResult, curves, games, paid, signal_in, tensors

pytestmark = pytest.mark.faults

KILLS = 32
KILLS_OF_A_RUN = 8
PHASES = ("rollout", "backward", "step", "save", "seal", "backward", "step", "validation", "export")
FAMILIES = ("rollout",), ("backward",), ("step", "update"), ("save", "seal")  # each must be hit at least once


@pytest.fixture(scope="module")
def undisturbed(launcher, arguments, tmp_path_factory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("undisturbed")
    result = launcher.run(folder, arguments)
    assert result.codes == [0, 0], (folder / "rank0.log").read_text()
    return folder, result


def test_a_run_that_is_killed_often_ends_like_an_undisturbed_one(launcher, arguments, undisturbed, tmp_path):
    whole, reference = undisturbed
    rng, hits, run = random.Random(0), Counter[str](), 0
    while hits.total() < KILLS:
        run += 1
        folder = tmp_path / f"run{run}"
        for _ in range(KILLS_OF_A_RUN):
            phase = PHASES[hits.total() % len(PHASES)]
            rank = 0 if phase == "seal" else rng.randrange(2)  # only the first rank seals
            delay = rng.random() * median(reference.spans(phase, rank))
            times, targets = rng.randint(1, 2), rng.choice([(0, 1), (1, 0), (rank,)])
            on_event = signal_in(phase, times=times, rank=rank, delay=delay, targets=targets)
            result = launcher.run(folder, arguments, on_event=on_event)
            if -9 not in result.codes:  # the run had ended before
                assert result.codes == [0, 0], (folder / "rank0.log").read_text()
                break
            hits[result.last_phase(rank)] += 1
        result = launcher.run(folder, arguments)
        assert result.codes == [0, 0], (folder / "rank0.log").read_text()
        check(folder, whole)
    print(f"{hits.total()} kills in {run} runs, by phase: {dict(hits)}")
    for family in FAMILIES:
        assert any(hits[phase] for phase in family), family


def check(folder: Path, whole: Path) -> None:
    """Weights, Adam states, metrics and games are equal, no call is paid twice, and nothing is left over."""
    run, other = folder / "run", whole / "run"
    assert tensors(run) == tensors(other)
    assert curves(run) == curves(other)
    assert games(run) == games(other)
    calls, once = paid(run), paid(other)
    assert calls.keys() == once.keys() and all(count <= once[key] for key, count in calls.items())
    left = {path.name for path in [*run.iterdir(), *(run / "checkpoints").iterdir()]}
    assert not [name for name in left if name.endswith((".tmp", ".old"))]
