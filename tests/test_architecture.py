"""The house rules that a machine can check: layers, homes of packages, sizes, docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")
METHOD = ("types", "protocol", "rollout", "reward", "grpo")  # and train.py: the method in one sitting
LIBRARY = sorted((ROOT / "prompt_r1").rglob("*.py"))
ENTRY_POINTS = [ROOT / "train.py", ROOT / "infer.py", ROOT / "evaluate.py"]
TREES = {path: ast.parse(path.read_text("utf-8")) for path in [*LIBRARY, *ENTRY_POINTS]}
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Third-party packages that have few homes; all others may be imported anywhere.
HOMES = {
    "httpx": ("prompt_r1/environments/", "prompt_r1/served.py"),  # the clients of endpoints
    "torch.distributed": (
        "prompt_r1/distributed.py",
        "prompt_r1/fsdp.py",
        "prompt_r1/policy.py",
        "prompt_r1/sharded.py",
        "prompt_r1/checkpoint.py",
        "prompt_r1/export.py",
    ),
    "flash_attn": ("prompt_r1/attention.py",),
    "pyarrow": ("prompt_r1/data/",),
    "huggingface_hub": ("prompt_r1/hub.py", "prompt_r1/similarity.py"),
    "tokenizers": ("prompt_r1/miniworld/tokenizer.py",),
    "safetensors": ("prompt_r1/sharded.py",),
    "torch.utils.tensorboard": ("prompt_r1/tracking.py",),
    "wandb": ("prompt_r1/tracking.py",),
}
LONG_FILES = {
    "prompt_r1/engine.py": 340,  # one scheduler, whose parts are of no use apart
    "prompt_r1/players.py": 260,
}
LONG_FUNCTIONS = {"prompt_r1/config.py:check", "train.py:train"}
# Methods that say by their name which interface they fill; the interface explains them.
INTERFACE = {"ask", "answer", "call", "check", "close", "forward", "prepare", "reply"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.Module) -> Iterator[str]:
    """The full names of the modules that a file imports, anywhere in it; TYPE_CHECKING ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms() -> dict[str, int]:
    """File or folder of prompt_r1 → its height in the README's tables: the method, then row by row."""
    first, second = (
        table.split("\n\n")[0] for table in re.split(r"\| file \|(?: lines \|)? what it ", README)[1:]
    )
    heights = dict.fromkeys(re.findall(r"prompt_r1/(\w+)", first), 0)
    for height, line in enumerate(second.splitlines(), start=1):
        heights |= dict.fromkeys(re.findall(r"(\w+)(?:\.py|/)`", line.split("|")[1]), height)
    return heights


def test_files_import_only_what_stands_above_them():
    """The layering that the README promises, read from the imports."""
    heights = rooms()
    wrong = []
    for path in LIBRARY:
        room = path.relative_to(ROOT / "prompt_r1").parts[0].removesuffix(".py")
        for module in imported(TREES[path]):
            parts = module.split(".")
            other = parts[1] if parts[0] == "prompt_r1" and len(parts) > 1 else ""
            if heights.get(room) and heights.get(other, 0) > heights[room]:
                wrong.append(f"{name_of(path)} imports {other}, which stands below it")
    assert not wrong


def test_nothing_below_imports_an_entry_point_or_a_test():
    outside = {"train", "infer", "evaluate", "tests", "benchmarks"}
    assert not [name_of(path) for path in LIBRARY for module in imported(TREES[path])
                if module.split(".")[0] in outside]  # fmt: skip


@pytest.mark.parametrize("package", HOMES)
def test_a_package_is_imported_only_in_its_homes(package):
    users = {name_of(path) for path, tree in TREES.items()
             if any(f"{module}.".startswith(f"{package}.") for module in imported(tree))}  # fmt: skip
    homes = HOMES[package]
    assert users and all(any(user.startswith(home) for home in homes) for user in users), users
    assert all(any(user.startswith(home) for user in users) for home in homes), "a home that nobody lives in"


def functions(tree: ast.AST, *, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Top-level functions and classes, and methods, with their dotted names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from functions(node, prefix=f"{prefix}{node.name}.")


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in TREES}
    long = {name: length for name, length in lengths.items() if length > 250}
    assert long.keys() <= LONG_FILES.keys(), long
    assert all(long.get(name, 0) <= most for name, most in LONG_FILES.items()), long
    assert all(name in long for name in LONG_FILES), "it has become short: strike it from the list"


def test_functions_are_short():
    long = {f"{name_of(path)}:{name}": node.end_lineno - node.lineno + 1
            for path, tree in TREES.items() for name, node in functions(tree)
            if not isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno + 1 > 50}  # fmt: skip
    assert set(long) <= LONG_FUNCTIONS, long


def test_the_method_is_read_in_one_sitting():
    files = [ROOT / "prompt_r1" / f"{name}.py" for name in METHOD] + [ROOT / "train.py"]
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= 1000


def says_it_by_its_name(name: str, node: Function | ast.ClassDef) -> bool:
    """A method of a known interface, or a property: a noun, explained by its class."""
    marks = [mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)]
    return bool({"property", "cached_property"} & set(marks)) or ("." in name and node.name in INTERFACE)


def undocumented(path: Path) -> list[str]:
    """Public functions, classes and methods that nothing explains."""
    return [
        f"{name_of(path)}:{name}"
        for name, node in functions(TREES[path])
        if not any(part.startswith("_") for part in name.split("."))
        and not ast.get_docstring(node)
        and not says_it_by_its_name(name, node)
    ]


def test_public_names_have_docstrings():
    assert not [name for path in TREES for name in undocumented(path)]


def test_every_name_that_the_method_takes_from_elsewhere_is_explained_there():
    """Who reads the six files meets names of other modules: each says in a docstring what it is."""
    files = [ROOT / "prompt_r1" / f"{name}.py" for name in METHOD] + [ROOT / "train.py"]
    unexplained = []
    for path in files:
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("prompt_r1."):
                continue
            home = ROOT / f"{node.module.replace('.', '/')}.py"
            home = home if home.exists() else home.with_suffix("") / "__init__.py"
            known = dict(functions(TREES[home]))
            wanted = [alias.name for alias in node.names]
            unexplained += [f"{name_of(path)}: {name}" for name in wanted
                            if name in known and not ast.get_docstring(known[name])]  # fmt: skip
    assert not unexplained
