"""The command `prompt-r1`, and what the programs import before they have read their flags."""

import subprocess
import sys
import zipfile

import pytest
from hatchling.builders.wheel import WheelBuilder

import prompt_r1
from prompt_r1.__main__ import PROGRAMS
from tests.support.paths import ROOT

SCRIPTS = ["train.py", "infer.py", "evaluate.py"]
SLOW_IMPORTS = ("torch", "transformers", "pyarrow")
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
    programs = [*SCRIPTS, *(f"prompt_r1 {name}" for name in PROGRAMS), "prompt_r1"]
    *texts, end = start(*(f"{program} --help" for program in programs)).stdout.split(
        "ended with 0 imported []\n"
    )
    assert end == ""
    for program, text in zip(programs, texts, strict=True):
        lines = text.splitlines()
        assert len(lines) > 5 and max(map(len, lines)) <= 80
        assert text.startswith(f"usage: {program.replace('prompt_r1', 'prompt-r1')} ")


WRONG = {
    "prompt_r1 trian": "prompt-r1: there is no program 'trian'; ",
    "prompt_r1 ask extra": "prompt-r1 ask: unrecognized arguments: extra; ",
}


def test_the_version_and_a_usage_error_import_nothing_slow():
    """A mistyped flag was reported after 12 s."""
    done = start("prompt_r1 --version", *WRONG)
    shown = f"prompt-r1 {prompt_r1.__version__}\nended with 0 imported []\n"
    assert done.stdout == shown + "ended with 2 imported []\n" * len(WRONG)
    for shown, sentence in zip(done.stderr.splitlines(), WRONG.values(), strict=True):
        assert shown.startswith(sentence)


@pytest.mark.slow
def test_the_wheel_holds_only_the_package_and_the_scripts(tmp_path):
    """With a folder `runs/` beside it, the package could not be built."""
    path = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    names = set(zipfile.ZipFile(path).namelist())
    outside = {name for name in names if not name.startswith(("prompt_r1/", "prompt_r1-"))}
    assert not outside and not [name for name in names if "test" in name or name.endswith(".pyc")]
    package = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "prompt_r1").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    scripts = {f"prompt_r1/scripts/{script}" for script in SCRIPTS}
    assert {name for name in names if not name.startswith("prompt_r1-")} == package | scripts
