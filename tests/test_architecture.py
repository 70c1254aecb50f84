"""The rules of the layout that a machine can check: imports and docstrings."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT
from tests.support.sizes import LIBRARY, PROGRAMS, files_imported_by, imported

# The method in one sitting, in this order; then train.py.
METHOD = ("types", "protocol", "rollout", "reward", "grpo")
# Training and asking work without these.
EXTRA = {"evaluation", "baselines", "api.py", "serving"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_no_file_of_the_package_imports_a_script_a_study_or_a_test():
    outside = {"train", "infer", "evaluate", "tests", "benchmarks", "studies", "examples"}
    modules = [(path.name, module) for path in LIBRARY for module in imported(path)]
    assert not [(file, module) for file, module in modules if module.split(".")[0] in outside]


@pytest.mark.parametrize("program", ["train.py", "infer.py"])
def test_training_and_asking_import_no_extra(program):
    rooms = {path.relative_to(ROOT).parts[1] for path in files_imported_by(ROOT / program)}
    assert not rooms & EXTRA


@pytest.mark.parametrize("name", METHOD)
def test_a_file_of_the_method_imports_none_that_is_read_after_it(name):
    later = METHOD[METHOD.index(name) + 1 :]
    assert not {f"prompt_r1.{other}" for other in later} & set(imported(ROOT / f"prompt_r1/{name}.py"))


def definitions(tree: ast.AST, *, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Top-level functions and classes, with their dotted names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield prefix + node.name, node


def test_every_file_and_public_function_and_class_has_a_docstring():
    missing: list[str] = []
    for path in [*LIBRARY, *PROGRAMS]:
        tree = ast.parse(path.read_text("utf-8"))
        if tree.body and not ast.get_docstring(tree):
            missing.append(path.name)
        missing += [
            f"{path.name}:{name}"
            for name, node in definitions(tree)
            if not name.startswith("_") and not ast.get_docstring(node)
        ]
    assert not missing
