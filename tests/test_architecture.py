"""The rules of the rooms that a machine can check: imports, homes of packages, docstrings, names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.map import EXTRA, METHOD, ROOMS, the_map
from tests.paths import ROOT

LIBRARY = sorted((ROOT / "prompt_r1").rglob("*.py"))
ENTRY_POINTS = [ROOT / "train.py", ROOT / "infer.py", ROOT / "evaluate.py"]
TREES = {path: ast.parse(path.read_text("utf-8")) for path in [*LIBRARY, *ENTRY_POINTS]}
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Third-party packages that only these files and folders import; all others may be imported anywhere.
HOMES = {
    "httpx": ("prompt_r1/endpoint/",),
    "torch.distributed": ("prompt_r1/distributed/", "prompt_r1/agent/policy.py", "prompt_r1/storage/"),
    "flash_attn": ("prompt_r1/agent/",),
    "pyarrow": ("prompt_r1/data/",),
    "math_verify": ("prompt_r1/metrics/with_math_verify.py",),
    "huggingface_hub": (
        "prompt_r1/hub.py",
        "prompt_r1/agent/",
        "prompt_r1/metrics/similarity.py",
        "prompt_r1/storage/export.py",
        "prompt_r1/storage/push.py",
    ),
    "tokenizers": ("prompt_r1/miniworld/tokenizer.py",),
    "safetensors": ("prompt_r1/storage/",),
    "torch.utils.tensorboard": ("prompt_r1/storage/trackers.py",),
    "starlette": ("prompt_r1/serving/",),
    "uvicorn": ("prompt_r1/serving/",),
    "pydantic": ("prompt_r1/serving/request.py",),
    "jsonschema": ("prompt_r1/serving/json_answer.py",),
    "prometheus_client": ("prompt_r1/serving/metrics.py",),
    "wandb": ("prompt_r1/storage/trackers.py",),
}
# Methods whose name says which interface they implement; the interface explains them.
INTERFACE = {"ask", "answer", "call", "cancel", "check", "close", "forward", "prepare"}
INTERFACE |= {"reply"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.Module) -> Iterator[str]:
    """The full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "prompt_r1").parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    """The other rooms that a file of the package imports."""
    names = {module.split(".")[1] for module in imported(TREES[path]) if module.startswith("prompt_r1.")}
    return names & set(ROOMS) - {room_of(path)}


def test_every_file_of_the_package_is_in_a_room():
    rooms = {room_of(path) for path in LIBRARY} - {"__init__", "__main__"}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_the_rooms_before_it(room):
    names = list(ROOMS)
    allowed = set(names[: names.index(room)])
    wrong = {name_of(path): rooms_imported(path) - allowed for path in LIBRARY if room_of(path) == room}
    assert not {file: rooms for file, rooms in wrong.items() if rooms}


def test_no_file_of_the_package_imports_a_script_or_a_test():
    outside = {"train", "infer", "evaluate", "tests", "benchmarks"}
    modules = [(name_of(path), module) for path in LIBRARY for module in imported(TREES[path])]
    assert not [(file, module) for file, module in modules if module.split(".")[0] in outside]


def test_train_py_imports_at_most_fifteen_of_our_modules():
    nodes = [node for node in ast.walk(TREES[ROOT / "train.py"]) if isinstance(node, ast.ImportFrom)]
    modules = {node.module for node in nodes if node.module and node.module.startswith("prompt_r1")}
    assert len(modules) <= 15, sorted(modules)


@pytest.mark.parametrize("package", HOMES)
def test_a_package_is_imported_only_in_its_homes(package):
    users = {
        name_of(path)
        for path, tree in TREES.items()
        if any(f"{module}.".startswith(f"{package}.") for module in imported(tree))
    }
    homes = HOMES[package]
    strangers = [user for user in users if not any(user.startswith(home) for home in homes)]
    unused = [home for home in homes if not any(user.startswith(home) for user in users)]
    assert users and not strangers and not unused, (strangers, unused)


def definitions(tree: ast.AST, *, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Top-level functions and classes, and methods, with their dotted names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, prefix=f"{prefix}{node.name}.")


def needs_no_docstring(name: str, node: Function | ast.ClassDef) -> bool:
    """A private name, a method of a known interface, or a property that its class explains."""
    if any(part.startswith("_") for part in name.split(".")):
        return True
    marks = [mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)]
    return bool({"property", "cached_property"} & set(marks)) or ("." in name and node.name in INTERFACE)


def test_public_functions_classes_and_methods_have_docstrings():
    missing = [
        f"{name_of(path)}:{name}"
        for path, tree in TREES.items()
        for name, node in definitions(tree)
        if not needs_no_docstring(name, node) and not ast.get_docstring(node)
    ]
    assert not missing


def test_no_public_class_name_is_used_twice():
    homes: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name_of(path))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_names_that_the_method_imports_are_explained_where_they_are_defined():
    """A reader of the six files meets names of other modules: each has a docstring."""
    unexplained = []
    for path in [*(ROOT / "prompt_r1" / f"{name}.py" for name in METHOD), ROOT / "train.py"]:
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("prompt_r1."):
                continue
            home = ROOT / f"{node.module.replace('.', '/')}.py"
            known = dict(definitions(TREES[home]))
            for alias in node.names:
                if alias.name in known and not ast.get_docstring(known[alias.name]):
                    unexplained.append(f"{name_of(path)}: {alias.name}")
    assert not unexplained


def test_the_map_is_what_its_script_prints():
    assert (ROOT / "docs/map.md").read_text("utf-8") == the_map(), "python -m tests.map > docs/map.md"


def files_imported_by(script: Path) -> set[Path]:
    """The files of the package that a script imports, directly or through other files."""
    found, waiting = set(), [script]
    while waiting:
        for module in imported(TREES[waiting.pop()]):
            path = ROOT / module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if file in TREES and file not in found:
                found.add(file)
                waiting.append(file)
    return found


def test_training_imports_all_core_rooms_and_no_extra_one_and_inference_no_extra_one():
    trained = {room_of(path) for path in files_imported_by(ROOT / "train.py") - set(ENTRY_POINTS)}
    assert trained - {"__init__"} == set(ROOMS) - set(EXTRA)
    asked = {room_of(path) for path in files_imported_by(ROOT / "infer.py") - set(ENTRY_POINTS)}
    assert not asked & set(EXTRA)
