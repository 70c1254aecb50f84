"""A full disk: a small file system of its own (needs unprivileged namespaces of Linux)."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.runs import tensors
from tests.paths import ROOT

pytestmark = pytest.mark.faults

NAMESPACE = ["unshare", "--user", "--mount", "--map-root-user"]


def can_mount(folder: Path) -> bool:
    try:
        line = [*NAMESPACE, "mount", "-t", "tmpfs", "none", str(folder)]
        return subprocess.run(line, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_stops_the_run_and_it_resumes_when_there_is_space(arguments, launcher, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if not can_mount(small):
        pytest.skip("no mount namespaces here")
    train = shlex.join([sys.executable, str(ROOT / "train.py"), *arguments])
    script = f"""
        mount -t tmpfs -o size=2500k none {small} && cd {small} && head -c 1000k /dev/zero > filler
        {train} > ../first.log 2>&1; echo $? > ../first.code
        ls -A run/checkpoints > ../left
        rm filler
        {train} > ../second.log 2>&1; echo $? > ../second.code
        cp -r run ../run
    """
    subprocess.run([*NAMESPACE, "sh", "-c", script], check=True, timeout=240)
    log = (tmp_path / "first.log").read_text()
    assert (tmp_path / "first.code").read_text() == "75\n", log
    assert "No space left on device" in log and "Traceback" not in log
    left = (tmp_path / "left").read_text().split()
    assert left and all(name.startswith("step-") for name in left)
    again = (tmp_path / "second.log").read_text()
    assert (tmp_path / "second.code").read_text() == "0\n" and "Resuming after step" in again, again
    assert launcher.run(tmp_path / "whole", arguments, ranks=1).codes == [0]
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole/run")
