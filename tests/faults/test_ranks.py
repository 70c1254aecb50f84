"""Ranks that die, raise, hang or compute non-finite values; other numbers of ranks; two runs in a folder."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from prompt_r1.storage.run_log import read_metrics
from tests.faults.runs import signal_in, tensors
from tests.programs import call, command

pytestmark = pytest.mark.faults


def start_torchrun(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """Start two ranks under torchrun itself."""
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command("train.py", *arguments, ranks=2), cwd=folder, env=environment, **pipes)


def wait_for(happened) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def ranks_of(torchrun: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    by_rank = {}
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        by_rank |= {int(entry[5:]): child for entry in variables if entry.startswith(b"RANK=")}
    return [by_rank[rank] for rank in sorted(by_rank)]


def test_a_rank_that_dies_ends_the_others_and_a_second_run_in_the_folder_is_refused(
    arguments, launcher, tmp_path
):
    """Torchrun names the rank. The run can be resumed without torchrun."""
    with start_torchrun(tmp_path, arguments) as torchrun:
        wait_for(lambda: len(read_lines(tmp_path / "run")) >= 2)
        ranks = ranks_of(torchrun)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # so that the run does not end meanwhile
        refused = call(tmp_path, "train.py", *arguments)
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        died = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = torchrun.communicate(timeout=60)
    assert refused.returncode == 2 and "run is in use by process" in refused.stderr
    assert torchrun.returncode != 0 and time.monotonic() - died < 30
    assert "rank      : 1 " in output and "Signal 9 (SIGKILL)" in output
    assert launcher.run(tmp_path, arguments).codes == [0, 0]
    whole = tmp_path / "whole"
    assert launcher.run(whole, arguments).codes == [0, 0]
    assert tensors(tmp_path / "run") == tensors(whole / "run")


def read_lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []


def test_a_rank_that_raises_ends_the_others_and_torchrun_names_it(arguments, tmp_path):
    (tmp_path / "run/trajectories/step-000001-rank1.jsonl").mkdir(parents=True)  # it cannot write its games
    with start_torchrun(tmp_path, arguments) as torchrun:
        output, _ = torchrun.communicate(timeout=120)
    assert torchrun.returncode != 0 and "rank      : 1 " in output and "IsADirectoryError" in output


def test_a_rank_that_hangs_is_named_after_the_timeout(arguments, launcher, tmp_path):
    on_event = signal_in("rollout", times=2, rank=1, targets=(1,), number=signal.SIGSTOP)
    result = launcher.run(tmp_path, [*arguments, "--rank-timeout", "5"], on_event=on_event)
    assert result.codes == [75, -9] and result.ended - result.signalled < 30
    assert "rank 1 did not respond" in (tmp_path / "rank0.log").read_text()
    assert launcher.run(tmp_path, arguments).codes == [0, 0]


def test_non_finite_gradients_of_one_rank_are_skipped_by_all_ranks_and_counted(arguments, launcher, tmp_path):
    """Infinite advantages on rank 1 in step 1: both ranks skip the affected optimiser steps."""
    assert launcher.run(tmp_path, arguments, poisoned=1, steps=1).codes == [0, 0]
    skipped = [row.get("update/skipped", 0) for row in read_metrics(tmp_path / "run")]
    assert skipped[1] > 0 and not any(skipped[2:])
    assert all(math.isfinite(value) for row in read_metrics(tmp_path / "run")[2:] for value in row.values())


def test_non_finite_gradients_in_every_step_stop_the_run(arguments, launcher, tmp_path):
    assert launcher.run(tmp_path, arguments, poisoned=1, steps=99).codes == [75, 75]
    assert "not finite in" in (tmp_path / "rank0.log").read_text()


MODES = [(2, ["ddp", "none"], 1), (2, ["fsdp", "none"], 1), (1, ["none", "fsdp"], 2)]


@pytest.mark.parametrize(("before", "modes", "after"), MODES)
def test_a_run_resumes_with_another_number_of_ranks(arguments, launcher, tmp_path, before, modes, after):
    """Games and losses are equal up to rounding, because the order of sums differs."""
    on_event = signal_in("save", times=3, targets=tuple(range(before)))
    result = launcher.run(tmp_path, [*arguments, "--parallel", modes[0]], ranks=before, on_event=on_event)
    assert result.codes == [-9] * before
    done = launcher.run(tmp_path, [*arguments, "--parallel", modes[1]], ranks=after)
    log = (tmp_path / "rank0.log").read_text()
    assert done.codes == [0] * after and "Resuming after step" in log
    assert launcher.run(tmp_path / "whole", arguments, ranks=1).codes == [0]
    for mine, other in zip(read_metrics(tmp_path / "run"), read_metrics(tmp_path / "whole/run"), strict=True):
        for name in ("step", "loss", "kl", "grad_norm", "reward/mean", "tokens/sampled", "val/reward"):
            assert mine.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-3, abs=1e-5), (
                mine["step"],
                name,
            )
