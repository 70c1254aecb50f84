"""Run a notebook's cells in this process, and write their outputs: `python -m tests.support.notebook FILE`.

Jupyter is not needed. An output is what a cell prints, and the value of its last expression as SVG or text.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def run_cells(notebook: dict[str, Any]) -> None:
    """Run the code cells in their order, and replace their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            cell["outputs"] = _outputs("".join(cell["source"]), names, f"cell {number}")
            cell["execution_count"] = None


def _outputs(source: str, names: dict[str, Any], where: str) -> list[Cell]:
    """Run a cell. `names` are the variables of the notebook."""
    statements = ast.parse(source).body
    ends_with_value = bool(statements) and isinstance(statements[-1], ast.Expr)
    before = statements[:-1] if ends_with_value else statements
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(before, []), where, "exec"), names)
        if ends_with_value:
            value = eval(compile(ast.Expression(statements[-1].value), where, "eval"), names)
    outputs: list[Cell] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_svg_"):
            data["image/svg+xml"] = value._repr_svg_().splitlines(keepends=True)
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def write(path: Path, notebook: dict[str, Any]) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    content = json.loads(file.read_text("utf-8"))
    run_cells(content)
    write(file, content)
