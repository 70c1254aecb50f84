"""SIGKILL at random moments: the resumed run ends as the undisturbed one. `python -m pytest -m faults`."""

import random
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from tests.faults.lives import Life, curves, games, paid, striker, tensors

pytestmark = pytest.mark.faults

KILLS = 32
KILLS_OF_A_RUN = 8
AIMED_AT = ("rollout", "backward", "step", "save", "seal", "backward", "step", "validation", "export")
FAMILIES = ("rollout",), ("backward",), ("step", "update"), ("save", "seal")  # as found, not as aimed at


@pytest.fixture(scope="module")
def undisturbed(nurse, line, tmp_path_factory) -> tuple[Path, Life]:
    folder = tmp_path_factory.mktemp("undisturbed")
    life = nurse.live(folder, line)
    assert life.codes == [0, 0], (folder / "rank0.log").read_text()
    return folder, life


def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(nurse, line, undisturbed, tmp_path):
    whole, reference = undisturbed
    rng, landed, run = random.Random(0), Counter[str](), 0
    while landed.total() < KILLS:
        run += 1
        folder = tmp_path / f"run{run}"
        for _ in range(KILLS_OF_A_RUN):
            phase = AIMED_AT[landed.total() % len(AIMED_AT)]
            rank = 0 if phase == "seal" else rng.randrange(2)  # only the first rank seals
            delay = rng.random() * median(reference.spans(phase, rank))
            strike = striker(phase, times=rng.randint(1, 2), rank=rank, delay=delay,
                             victims=rng.choice([(0, 1), (1, 0), (rank,)]))  # fmt: skip
            life = nurse.live(folder, line, strike=strike)
            if -9 not in life.codes:  # it had ended before
                assert life.codes == [0, 0], (folder / "rank0.log").read_text()
                break
            landed[life.standing(rank)] += 1
        life = nurse.live(folder, line)
        assert life.codes == [0, 0], (folder / "rank0.log").read_text()
        check(folder, whole)
    print(f"{landed.total()} kills in {run} runs, by the phase in which they landed: {dict(landed)}")
    for family in FAMILIES:
        assert any(landed[phase] for phase in family), family


def check(folder: Path, whole: Path) -> None:
    """The same weights, Adam states, lines and games; nothing twice; nothing left over."""
    run, other = folder / "run", whole / "run"
    assert tensors(run) == tensors(other)
    assert curves(run) == curves(other)
    assert games(run) == games(other)
    calls, once = paid(run), paid(other)
    assert calls.keys() == once.keys() and all(count <= once[key] for key, count in calls.items())
    left = {path.name for path in [*run.iterdir(), *(run / "checkpoints").iterdir()]}
    assert not [name for name in left if name.endswith((".tmp", ".old"))]
