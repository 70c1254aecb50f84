"""Runs shell lines as a user types them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def runner_in(folder: Path, **environment: str) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """A function that runs a shell line in the folder and asserts its success.

    What the line leaves in the background ends with it, and a Python process that hangs shows where.
    """
    paths = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    variables |= {"PATH": paths, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "PYTHONFAULTHANDLER": "1"}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        # A server that survives a failed command would keep our pipes open.
        shell = ["bash", "-e", "-o", "pipefail", "-c", f"trap 'kill %1 2> /dev/null || true' EXIT\n{line}"]
        with subprocess.Popen(
            shell,
            cwd=folder,
            env={**variables, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=600)
            except subprocess.TimeoutExpired:
                subprocess.run(["pkill", "-ABRT", "-s", str(process.pid)], check=False)
                stdout, stderr = process.communicate()
        assert process.returncode == 0, f"{line}\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(shell, 0, stdout, stderr)

    return run
