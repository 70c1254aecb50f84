"""The layout that a machine can check: which room may import which, and that each has a sign at its door."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "prompt_r1"
# The method, in reading order. Its files import nothing but each other.
METHOD = (
    "types",
    "spending",
    "errors",
    "normalise",
    "f1",
    "chat_template",
    "protocol",
    "rollout",
    "reward",
    "grpo",
)
# From the ground up: a room imports the method, itself and the rooms below it.
FLOORS = (
    ("programs",),
    ("settings",),
    ("model",),
    ("engine", "miniworld"),
    ("data", "environments"),
    ("pair",),
    ("training",),
    ("evaluation",),
)
ROOMS = [room for floor in FLOORS for room in floor]


def imported(path: Path) -> set[str]:
    """The full names of the modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_imported(path: Path) -> set[str]:
    """The rooms of the package, or files at its root, that a file imports."""
    modules = [name.split(".") for name in imported(path) if name.startswith("prompt_r1.")]
    return {module[1] for module in modules if (PACKAGE / module[1]).is_dir() or module[1] in METHOD}


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def test_every_folder_of_the_package_is_a_room_with_a_floor():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", *METHOD}


@pytest.mark.parametrize("name", METHOD)
def test_a_file_of_the_method_imports_no_room(name):
    assert rooms_imported(PACKAGE / f"{name}.py") <= set(METHOD)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room):
    floor = next(number for number, rooms in enumerate(FLOORS) if room in rooms)
    allowed = {*METHOD, room, *(below for rooms in FLOORS[:floor] for below in rooms)}
    for path in files_of(room):
        assert rooms_imported(path) <= allowed, path


@pytest.mark.parametrize("room", ROOMS)
def test_the_sign_at_the_door_of_a_room_names_each_of_its_files(room):
    sign = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8")))
    words = set(re.findall(r"\w+", sign or ""))
    assert {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"} <= words


def test_no_file_of_the_package_imports_a_program_a_study_or_a_test():
    outside = {"train", "infer", "evaluate", "tests", "benchmarks", "studies", "examples"}
    for path in PACKAGE.rglob("*.py"):
        assert not outside & {name.split(".")[0] for name in imported(path)}, path
