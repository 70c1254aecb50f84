"""The notebook of examples/ runs from top to bottom, and what it shows was computed by its own cells."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.paths import ROOT

PATH = ROOT / "examples/the_method_by_hand.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_its_agent_learns(monkeypatch):
    monkeypatch.setenv("NOTEBOOK_STEPS", "10")
    notebook = nbformat.read(PATH, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    [curve] = [cell for cell in notebook.cells if "held-out EM" in printed(cell)]
    rates = [float(line.split()[-1]) for line in printed(curve).splitlines() if "held-out EM" in line]
    assert rates[-1] > 0.5


def test_the_stored_outputs_are_those_of_the_stored_cells():
    """Cells that were run out of order, or changed and not run, would show something else."""
    notebook = nbformat.read(PATH, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = "".join(map(printed, code))
    assert "held-out EM" in outputs and "Traceback" not in outputs


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell wrote to stdout and stderr."""
    return "".join(output.get("text", "") for output in cell.get("outputs", []))
