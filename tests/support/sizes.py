"""The sizes of the project: `python -m tests.support.sizes`; `--step`: the files of one training step."""

import ast
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType

from prompt_r1.settings.fields import settings_of
from prompt_r1.settings.train import TrainConfig
from tests.support.paths import ROOT

LIBRARY = sorted((ROOT / "prompt_r1").rglob("*.py"))
PROGRAMS = [ROOT / "train.py", ROOT / "infer.py", ROOT / "evaluate.py"]
WEB = ("*.html", "*.js", "*.css", "*.jinja2")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "benchmarks/**/*.md")


def lines(files: Iterable[Path]) -> int:
    """The number of lines of these files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in files)


def python_in(*folders: str) -> list[Path]:
    """The Python files below these folders of the repository."""
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


@cache
def imported(path: Path, *, at_start: bool = False) -> list[str]:
    """The full names of the modules that a file imports, anywhere in it; `at_start`: when it is imported."""
    names: list[str] = []
    module = ast.parse(path.read_text("utf-8"))
    for node in module.body if at_start else ast.walk(module):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return names


def files_imported_by(script: Path, *, at_start: bool = False) -> set[Path]:
    """The files of the package that a script imports, directly or through other files."""
    known, found, waiting = set(LIBRARY), set[Path](), [script]
    while waiting:
        for module in imported(waiting.pop(), at_start=at_start):
            path = ROOT / module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if file in known and file not in found:
                found.add(file)
                waiting.append(file)
    return found


def words() -> int:
    """Words of the documents."""
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    return sum(len(path.read_text("utf-8").split()) for path in pages)


def files_of_a_step() -> list[Path]:
    """The files that the first training step of a mini run enters, in this order."""
    import train
    from prompt_r1.programs.command_line import run_program
    from prompt_r1.settings.train import train_config

    entered: dict[str, None] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and (entered or code is train.play_step.__code__):
            entered.setdefault(code.co_filename)
        if event == "return" and code.co_name == "finish_step":
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = f"train.py --steps 2 --val-data none --test-data none --out {folder}/run".split()
        sys.setprofile(watch)
        try:
            run_program(train.main, train_config(sys.argv[1:]))
        except SystemExit:
            pass
        finally:
            sys.setprofile(None)
    return [Path(name) for name in entered if name.startswith(f"{ROOT}/") and "/.venv/" not in name]


def main() -> None:
    """Print the table, or the files of one training step."""
    if "--step" in sys.argv:
        files = files_of_a_step()
        for path in files:
            print(f"{lines([path]):6} {path.relative_to(ROOT)}")
        print(f"{lines(files):6} in {len(files)} files")
        return
    train = PROGRAMS[0]
    web = [path for pattern in WEB for path in (ROOT / "prompt_r1").rglob(pattern)]
    rows = {
        "package and programs, lines of Python": lines([*LIBRARY, *PROGRAMS]),
        "what train.py imports, lines": lines([train, *files_imported_by(train)]),
        "  at its start": lines([train, *files_imported_by(train, at_start=True)]),
        "  and opens by name: the mini world": lines(python_in("prompt_r1/miniworld")),
        "tests, lines": lines(python_in("tests")),
        "words of the documents": words(),
        "flags of train.py": len(settings_of(TrainConfig)),
        "web assets, lines": lines(web),
        "studies, examples and benchmarks, lines": lines(python_in("studies", "examples", "benchmarks")),
    }
    for name, count in rows.items():
        print(f"{count:7,}  {name}")


if __name__ == "__main__":
    main()
