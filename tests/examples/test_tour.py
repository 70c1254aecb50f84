"""examples/tour.ipynb runs from its first cell to its last, and its committed outputs are clean."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

TOUR = ROOT / "examples/tour.ipynb"


def outputs_of(text: str) -> list[str]:
    """What each code cell prints and shows, as text."""
    shown = []
    for cell in json.loads(text)["cells"]:
        for output in cell.get("outputs", []):
            shown.append("".join(output.get("text") or output["data"]["text/plain"]))
    return shown


def test_the_committed_notebook_has_outputs_without_paths_or_counts():
    text = TOUR.read_text("utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] is None for cell in code)
    assert len(outputs_of(text)) == len(code) - 1, "the first cell only imports"
    assert not re.search(r"/(home|work|tmp|root|Users)/|Traceback|Warning", "".join(outputs_of(text)))
    assert len(text) < 40_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_its_run_learns(tmp_path):
    for name in ("examples", "prompt_r1", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    copy = tmp_path / "tour.ipynb"
    copy.write_text(TOUR.read_text("utf-8"), "utf-8")
    line = [sys.executable, "-m", "tests.support.notebook", copy]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(line, cwd=tmp_path, env=environment, check=True)

    asked, marked, scored, _, learned, _, curve = outputs_of(copy.read_text("utf-8"))
    assert [asked, marked] == outputs_of(TOUR.read_text("utf-8"))[:2], "greedy games are the same everywhere"
    assert len(set(re.findall(r"R +(-?\d\.\d\d)", scored))) > 2, "rewards of the group differ"
    moves = re.findall(r"(-\d+\.\d+) -> +(-\d+\.\d+)", learned)
    (best_before, best_after), (worst_before, worst_after) = [tuple(map(float, move)) for move in moves]
    assert best_after > best_before and worst_after < worst_before
    ems = [float(em) for em in re.findall(r"\d\.\d\d", curve)]
    assert len(ems) == 4 and ems[-1] > ems[0] + 0.3
