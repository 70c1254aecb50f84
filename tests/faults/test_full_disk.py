"""A disk that is full, on a small file system of its own (needs Linux's unprivileged namespaces)."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fault_harness import saved_tensors
from tests.support.paths import ROOT

pytestmark = pytest.mark.faults

NAMESPACE = ["unshare", "--user", "--mount", "--map-root-user"]


def can_mount(folder: Path) -> bool:
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "none", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_stops_the_run_with_a_message_and_freeing_space_lets_it_resume(
    arguments, harness, tmp_path
):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("no mount namespaces here")
    train = shlex.join([sys.executable, str(ROOT / "train.py"), *arguments])
    script = f"""
        mount -t tmpfs -o size=2500k none {disk} && cd {disk} && head -c 1000k /dev/zero > filler
        {train} > ../first.log 2>&1; echo $? > ../first.code
        ls -A run/checkpoints > ../checkpoints
        rm filler
        {train} > ../second.log 2>&1; echo $? > ../second.code
        cp -r run ../run
    """
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as the harness: rounding depends on it
    subprocess.run([*NAMESPACE, "sh", "-c", script], check=True, timeout=240, env=one_thread)
    first_log = (tmp_path / "first.log").read_text()
    assert (tmp_path / "first.code").read_text() == "75\n", first_log
    assert "No space left on device" in first_log and "Traceback" not in first_log
    checkpoints = (tmp_path / "checkpoints").read_text().split()
    assert checkpoints and all(name.startswith("step-") for name in checkpoints)
    second_log = (tmp_path / "second.log").read_text()
    assert (tmp_path / "second.code").read_text() == "0\n", second_log
    assert "Resuming after step" in second_log, second_log
    assert harness.run(tmp_path / "uninterrupted", arguments, ranks=1).exit_codes == [0]
    assert saved_tensors(tmp_path / "run") == saved_tensors(tmp_path / "uninterrupted/run")
