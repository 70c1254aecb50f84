"""Faults of one rank (killed), and a resume on another number of ranks."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from prompt_r1.training.log import read_metrics
from tests.support.fault_harness import Fault, saved_tensors
from tests.support.programs import call, command, wait_for

pytestmark = pytest.mark.faults


def processes_by_rank(launcher: subprocess.Popen) -> list[int]:
    """The process ids of the ranks that torchrun started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    by_rank: dict[int, int] = {}
    for child in map(int, children):
        for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                by_rank[int(variable.removeprefix(b"RANK="))] = child
    return [by_rank[rank] for rank in sorted(by_rank)]


def test_a_killed_rank_stops_the_others_and_a_second_run_in_the_folder_is_refused(
    arguments, harness, tmp_path
):
    """torchrun names the killed rank. The resumed run ends like one that was not interrupted."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = command("train.py", *arguments, ranks=2)  # torchrun itself
    with subprocess.Popen(line, cwd=tmp_path, env=one_thread, **pipes) as launcher:
        wait_for(lambda: len(read_metrics(tmp_path / "run")) >= 2, launcher)
        processes = processes_by_rank(launcher)
        for process in processes:  # pause the run, so that it cannot end before the second one starts
            os.kill(process, signal.SIGSTOP)
        refused = call(tmp_path, "train.py", *arguments)
        for process in processes:
            os.kill(process, signal.SIGCONT)
        killed_at = time.monotonic()
        os.kill(processes[1], signal.SIGKILL)
        output, _ = launcher.communicate(timeout=60)
    assert refused.returncode == 2 and "run is in use by process" in refused.stderr
    assert launcher.returncode != 0 and time.monotonic() - killed_at < 30
    assert "rank      : 1 " in output and "Signal 9 (SIGKILL)" in output
    assert harness.run(tmp_path, arguments).exit_codes == [0, 0]
    uninterrupted = tmp_path / "uninterrupted"
    assert harness.run(uninterrupted, arguments).exit_codes == [0, 0]
    assert saved_tensors(tmp_path / "run") == saved_tensors(uninterrupted / "run")


# The rank that dies, and the phase in which it does.
LOSSES = [(1, "rollout"), (1, "backward"), (0, "save")]


@pytest.mark.parametrize(("victim", "phase"), LOSSES)
def test_a_rank_that_has_lost_another_ends_with_one_sentence_and_the_run_can_be_resumed(
    arguments, harness, tmp_path, victim, phase
):
    fault = Fault(phase, occurrence=2, rank=victim, targets=(victim,))
    ended = harness.run(tmp_path, arguments, fault=fault, launcher=False)
    survivor = 1 - victim
    log = (tmp_path / f"rank{survivor}.log").read_text()
    assert ended.exit_codes[victim] == -signal.SIGKILL and ended.exit_codes[survivor] == 75, log
    assert ended.seconds_after_fault < 30
    assert log.count("could not communicate") == 1, log
    assert "Traceback" not in log
    assert harness.run(tmp_path, arguments).exit_codes == [0, 0]


@pytest.mark.parametrize("name", ["config.yaml", "test.md"])
def test_a_file_that_the_first_rank_cannot_write_stops_all_of_them_with_its_name(
    name, arguments, harness, tmp_path
):
    """The other rank waited for it, and said that it could not communicate."""
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/.lock").touch()
    ended = harness.run(tmp_path, [*arguments, "--steps", "1"], launcher=False)
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert ended.exit_codes == [2, 2] and all(f"run/{name}: Is a directory" in log for log in logs), logs


# Ranks and --parallel before the kill, then after it.
RANK_CHANGES = [(2, "fsdp", 1, "auto"), (1, "auto", 2, "ddp")]


@pytest.mark.parametrize(("ranks_before", "parallel_before", "ranks_after", "parallel_after"), RANK_CHANGES)
def test_a_run_resumes_on_another_number_of_ranks(
    arguments, harness, tmp_path, ranks_before, parallel_before, ranks_after, parallel_after
):
    """The same games and losses as on a constant number of ranks, up to the order of sums."""
    kill = Fault("save", occurrence=3, targets=tuple(range(ranks_before)))
    killed = harness.run(
        tmp_path, [*arguments, "--parallel", parallel_before], ranks=ranks_before, fault=kill
    )
    assert killed.exit_codes == [-9] * ranks_before
    resumed = harness.run(tmp_path, [*arguments, "--parallel", parallel_after], ranks=ranks_after)
    log = (tmp_path / "rank0.log").read_text()
    assert resumed.exit_codes == [0] * ranks_after and "Resuming after step" in log
    uninterrupted = tmp_path / "uninterrupted"
    assert harness.run(uninterrupted, arguments, ranks=1).exit_codes == [0]
    names = "step loss kl grad_norm reward/mean tokens/sampled val/reward".split()
    lines = zip(read_metrics(tmp_path / "run"), read_metrics(uninterrupted / "run"), strict=True)
    for got, want in lines:
        for name in names:
            expected = pytest.approx(want.get(name, 0), rel=1e-3, abs=1e-5)
            assert got.get(name, 0) == expected, (got["step"], name)
