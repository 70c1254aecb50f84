"""What the programs import before they have read their flags, and what the wheel holds."""

import subprocess
import sys
import zipfile

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.support.paths import ROOT

PROGRAMS = [
    "train.py",
    "infer.py",
    "evaluate.py",
    "prompt_r1.data",
    "prompt_r1.pair",
    "prompt_r1.training.report",
    "prompt_r1.training.warm_start",
]
SLOW_IMPORTS = ("torch", "transformers", "pyarrow", "numpy", "httpx")
# Runs scripts and modules as Python does, and prints after each which of SLOW_IMPORTS have been imported.
WATCHER = """
import runpy, sys
for line in {lines!r}:
    sys.argv = line.split()
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    else:
        code = 0
    print("ended with", code, "imported", [name for name in {imported!r} if name in sys.modules])
"""


def start(*lines: str) -> subprocess.CompletedProcess[str]:
    """Run programs in one process, and print how each ended, and what was imported."""
    source = WATCHER.format(imported=SLOW_IMPORTS, lines=lines)
    return subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )


def test_help_imports_nothing_slow_and_fits_80_columns():
    """`--help` took 5 s of CPU: every script imported torch before it read its flags."""
    done = start(*(f"{program} --help" for program in PROGRAMS))
    *texts, end = done.stdout.split("ended with 0 imported []\n")
    assert end == ""
    for program, text in zip(PROGRAMS, texts, strict=True):
        lines = text.splitlines()
        assert len(lines) > 5 and max(map(len, lines)) <= 80
        typed = program if program.endswith(".py") else f"python -m {program}"
        assert text.startswith(f"usage: {typed} ")


def test_a_usage_error_imports_nothing_slow():
    """A mistyped flag was reported after 12 s."""
    done = start(*(f"{program} --lerning-rate 1" for program in PROGRAMS))
    assert done.stdout == "ended with 2 imported []\n" * len(PROGRAMS)
    assert all("--help` lists the flags" in sentence for sentence in done.stderr.splitlines())


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    """With a folder `runs/` beside it, the package could not be built."""
    path = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    names = {name for name in zipfile.ZipFile(path).namelist() if not name.startswith("prompt_r1-")}
    package = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "prompt_r1").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert names == package
