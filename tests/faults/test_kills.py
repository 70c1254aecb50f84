"""SIGKILL at random moments: the resumed run ends like an uninterrupted run."""

import random
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from tests.support.fault_harness import Fault, ProcessRun, games_of, metrics_of, paid_calls, saved_tensors

pytestmark = pytest.mark.faults

KILLS = 10  # the least number of kills with each number of ranks
MAX_KILLS = 30
KILLS_OF_A_RUN = 5
TARGET_PHASES = "rollout backward step save complete backward step validation export".split()
# A kill may land in a later phase than the one it is aimed at: kills go on until each of these was hit.
PHASES_TO_HIT = [("rollout",), ("backward",), ("step", "update"), ("save", "complete")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_repeatedly_ends_like_an_uninterrupted_one(harness, arguments, tmp_path, ranks):
    reference_folder = tmp_path / "uninterrupted"
    reference = harness.run(reference_folder, arguments, ranks=ranks)
    assert reference.exit_codes == [0] * ranks, (reference_folder / "rank0.log").read_text()
    rng = random.Random(0)
    phases_hit = Counter[str]()
    runs = 0
    while phases_hit.total() < KILLS or missed_phases(phases_hit):
        assert phases_hit.total() < MAX_KILLS, f"kills hit these phases only: {dict(phases_hit)}"
        runs += 1
        folder = tmp_path / f"run{runs}"
        for _ in range(KILLS_OF_A_RUN):
            kill = aim(phases_hit, rng, reference, ranks)
            process_run = harness.run(folder, arguments, ranks=ranks, fault=kill)
            if -9 not in process_run.exit_codes:  # it ended before the kill
                assert process_run.exit_codes == [0] * ranks, (folder / "rank0.log").read_text()
                break
            phases_hit[process_run.last_phase(kill.rank)] += 1
        process_run = harness.run(folder, arguments, ranks=ranks)
        assert process_run.exit_codes == [0] * ranks, (folder / "rank0.log").read_text()
        check_same_run(folder / "run", reference_folder / "run")
    print(f"{phases_hit.total()} kills in {runs} runs, by the phase that they hit: {dict(phases_hit)}")


def aim(phases_hit: Counter[str], rng: random.Random, reference: ProcessRun, ranks: int) -> Fault:
    """Choose the next kill: first somewhere in each of TARGET_PHASES, then at the start of a missed phase."""
    kills = phases_hit.total()
    missed = missed_phases(phases_hit)
    is_aimed_at_missed = kills >= KILLS and bool(missed)
    phase = missed[0] if is_aimed_at_missed else TARGET_PHASES[kills % len(TARGET_PHASES)]
    rank = 0 if phase == "complete" else rng.randrange(ranks)  # only rank 0 completes a folder
    delay = 0.0 if is_aimed_at_missed else rng.random() * median(reference.durations(phase, rank))
    every_rank = tuple(range(ranks))
    targets = rng.choice([every_rank, every_rank[::-1], (rank,)])
    return Fault(phase, occurrence=rng.randint(1, 2), rank=rank, delay=delay, targets=targets)


def missed_phases(phases_hit: Counter[str]) -> list[str]:
    """A phase of each group of `PHASES_TO_HIT` in which no kill has landed."""
    return [phases[0] for phases in PHASES_TO_HIT if not any(phases_hit[phase] for phase in phases)]


@pytest.mark.parametrize(
    ("env", "phase"), [("py:tests.support.own_environments:ByCaller", "save"), ("hf:", "rollout")]
)
def test_a_killed_run_with_an_environment_that_takes_sessions_or_a_model_ends_the_same(
    harness, arguments, tmp_path, asking_agent, env, phase
):
    own = ["hf:" + str(asking_agent), "--env-args", '{"max_tokens": 16}'] if env == "hf:" else [env]
    arguments = [*arguments, "--env", *own]
    finished, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    ended = harness.run(killed, arguments, ranks=1, fault=Fault(phase, occurrence=2, targets=(0,)))
    assert ended.exit_codes == [-9]
    for folder in (killed, finished):
        done = harness.run(folder, arguments, ranks=1)
        assert done.exit_codes == [0], (folder / "rank0.log").read_text()
    check_same_run(killed / "run", finished / "run")
    assert set(paid_calls(killed / "run").values()) == {1}


def check_same_run(run: Path, reference: Path) -> None:
    """Compare weights, Adam states, metrics, games and paid calls; no temporary file is left."""
    assert saved_tensors(run) == saved_tensors(reference)
    assert metrics_of(run) == metrics_of(reference)
    assert games_of(run) == games_of(reference)
    calls, reference_calls = paid_calls(run), paid_calls(reference)
    assert calls.keys() == reference_calls.keys()
    assert all(count <= reference_calls[key] for key, count in calls.items())
    names = {path.name for path in [*run.iterdir(), *(run / "checkpoints").iterdir()]}
    assert not [name for name in names if name.endswith((".tmp", ".old"))]
