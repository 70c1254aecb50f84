"""The Slurm script, with stand-ins for `srun`, `scontrol` and `python`."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "examples/train.slurm"

# Starts two tasks of one node. As with --kill-on-bad-exit, a task that fails ends the other; returns the
# highest exit code.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && [ "$SRUN_CPUS_PER_TASK" = 8 ] || exit 99
shift
set -m # a process group for each task
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 "$@" &
done
highest=0
for _ in 0 1; do
    wait -n
    code=$?
    [ $code -gt $highest ] && highest=$code
    [ $code -ne 0 ] && for task in $(jobs -p); do kill -KILL -- "-$task" 2> /dev/null; done
done
exit $highest
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "$*" >> requeued; fi
"""
# The exit code of rank N is the Nth word of CODES; a rank without any goes on until it is killed. Rank 1
# exits after rank 0, whose code the script has noted by then.
PYTHON = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >> started
exits=($CODES)
[ -z "${exits[$RANK]}" ] && exec sleep 60
until [ "$(wc -l < "$codes")" -ge "$RANK" ]; do sleep 0.02; done
exit "${exits[$RANK]}"
"""


def submit(folder: Path, codes: str, *, seconds: int) -> subprocess.CompletedProcess[str]:
    """Run the script for ranks with these exit codes, as if it had begun so many seconds ago."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "412345", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_CPUS_PER_TASK": "8"}
    return subprocess.run(
        [SCRIPT, "--out", "a folder"],
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "CODES": codes, "SECONDS": str(seconds), **slurm},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_each_task_is_a_rank_with_the_arguments_of_the_script(tmp_path):
    assert submit(tmp_path, "0 0", seconds=0).returncode == 0
    started = sorted((tmp_path / "started").read_text().splitlines())
    assert started == [f"{rank} {rank} 2 2 node7 32345 train.py --out a folder" for rank in (0, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python", "scontrol", "srun", "started"]


@pytest.mark.parametrize(
    ("codes", "seconds", "exit_code", "requeued"),
    [
        ("75 75", 4000, 0, True),  # stopped by a signal, and saved
        ("75 75", 20, 75, False),  # it would stop again
        ("75 137", 4000, 0, True),  # rank 1 was killed, and rank 0 noticed it
        ("75 1", 4000, 1, False),  # a bug on rank 1
        ("2 2", 4000, 2, False),  # wrong usage
        ("0 0", 90_000, 0, False),
    ],
)
def test_only_a_run_that_can_be_resumed_is_requeued(tmp_path, codes, seconds, exit_code, requeued):
    done = submit(tmp_path, codes, seconds=seconds)
    assert done.returncode == exit_code, done.stderr
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 412345\n"


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    """Without --kill-on-bad-exit the others waited in NCCL until --rank-timeout."""
    assert submit(tmp_path, "137", seconds=4000).returncode == 137
    assert not (tmp_path / "requeued").exists()  # no rank has saved
