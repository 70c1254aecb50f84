"""The commands of docs/using.md, up to its Python section, run as they are printed, in one folder."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_ports

PAGE = (ROOT / "docs/using.md").read_text("utf-8").split("## From Python")[0]


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(tmp_path):
    for name in ("train.py", "evaluate.py", "prompt_r1"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    script = "\n".join(blocks).replace("8123", str(*free_ports(1)))
    paths = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-m", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": paths, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = ["my-questions", "my-model", "my-llm", "my-object", "my-game", "my-metric"]
    for run in runs:
        lines = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        assert len(lines) >= 2, run
    assert "prompt-r1" in done.stdout
