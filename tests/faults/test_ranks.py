"""A rank that dies, raises, hangs or computes nonsense; another number of ranks; two runs in one folder."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from prompt_r1.storage.run_log import read_metrics
from tests.faults.lives import striker, tensors
from tests.programs import call, command

pytestmark = pytest.mark.faults


def launch(folder: Path, line: list[str]) -> subprocess.Popen[str]:
    """Two ranks under torchrun itself."""
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command("train.py", *line, ranks=2), cwd=folder, env=environment, **pipes)


def wait_for(happened) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    by_rank = {}
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        by_rank |= {int(entry[5:]): child for entry in variables if entry.startswith(b"RANK=")}
    return [by_rank[rank] for rank in sorted(by_rank)]


def test_a_rank_that_dies_ends_the_others_and_a_second_run_in_the_folder_is_refused(line, nurse, tmp_path):
    """Under torchrun, which names the rank. What follows is the undisturbed run, whoever started it."""
    with launch(tmp_path, line) as launcher:
        wait_for(lambda: len(read_lines(tmp_path / "run")) >= 2)
        ranks = ranks_of(launcher)
        [os.kill(rank, signal.SIGSTOP) for rank in ranks]  # else it may end meanwhile
        refused = call(tmp_path, "train.py", *line)
        [os.kill(rank, signal.SIGCONT) for rank in ranks]
        died = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        told, _ = launcher.communicate(timeout=60)
    assert refused.returncode == 2 and "run is in use by process" in refused.stderr
    assert launcher.returncode != 0 and time.monotonic() - died < 30
    assert "rank      : 1 " in told and "Signal 9 (SIGKILL)" in told
    assert nurse.live(tmp_path, line).codes == [0, 0]
    whole = tmp_path / "whole"
    assert nurse.live(whole, line).codes == [0, 0]
    assert tensors(tmp_path / "run") == tensors(whole / "run")


def read_lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []


def test_a_rank_that_raises_ends_the_others_and_torchrun_names_it(line, tmp_path):
    (tmp_path / "run/trajectories/step-000001-rank1.jsonl").mkdir(parents=True)  # it cannot write its games
    with launch(tmp_path, line) as launcher:
        told, _ = launcher.communicate(timeout=120)
    assert launcher.returncode != 0 and "rank      : 1 " in told and "IsADirectoryError" in told


def test_a_rank_that_hangs_is_named_when_the_others_have_waited_long_enough(line, nurse, tmp_path):
    strike = striker("rollout", times=2, rank=1, victims=(1,), number=signal.SIGSTOP)
    life = nurse.live(tmp_path, [*line, "--rank-timeout", "5"], strike=strike)
    assert life.codes == [75, -9] and life.over - life.struck < 30
    assert "rank 1 did not respond" in (tmp_path / "rank0.log").read_text()
    assert nurse.live(tmp_path, line).codes == [0, 0]


def test_nonsense_on_one_rank_is_skipped_by_all_and_counted(line, nurse, tmp_path):
    """Infinite advantages on rank 1 in step 1: both ranks skip the optimiser steps that they touch."""
    assert nurse.live(tmp_path, line, poisoned=1, steps=1).codes == [0, 0]
    skipped = [row.get("update/skipped", 0) for row in read_metrics(tmp_path / "run")]
    assert skipped[1] > 0 and not any(skipped[2:])
    assert all(math.isfinite(value) for row in read_metrics(tmp_path / "run")[2:] for value in row.values())


def test_nonsense_that_does_not_end_stops_the_run(line, nurse, tmp_path):
    assert nurse.live(tmp_path, line, poisoned=1, steps=99).codes == [75, 75]
    assert "not finite in" in (tmp_path / "rank0.log").read_text()


WAYS = [(2, ["ddp", "none"], 1), (2, ["fsdp", "none"], 1), (1, ["none", "fsdp"], 2)]


@pytest.mark.parametrize(("before", "ways", "after"), WAYS)
def test_a_run_goes_on_with_another_number_of_ranks(line, nurse, tmp_path, before, ways, after):
    """The same games and losses as on as many ranks as before, but for the order of sums."""
    strike = striker("save", times=3, victims=tuple(range(before)))
    life = nurse.live(tmp_path, [*line, "--parallel", ways[0]], ranks=before, strike=strike)
    assert life.codes == [-9] * before
    done = nurse.live(tmp_path, [*line, "--parallel", ways[1]], ranks=after)
    log = (tmp_path / "rank0.log").read_text()
    assert done.codes == [0] * after and "Resuming after step" in log
    assert nurse.live(tmp_path / "whole", line, ranks=1).codes == [0]
    for mine, other in zip(read_metrics(tmp_path / "run"), read_metrics(tmp_path / "whole/run"), strict=True):
        for name in ("step", "loss", "kl", "grad_norm", "reward/mean", "tokens/sampled", "val/reward"):
            assert mine.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-3, abs=1e-5), (
                mine["step"],
                name,
            )
