"""Run this project's programs in processes of their own."""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from prompt_r1.config.fields import NOT_NEGATIVE, check_number
from prompt_r1.errors import UsageError
from prompt_r1.storage.run_log import read_metrics

Flags = Mapping[str, Sequence[object]]
"""Flag → its values."""


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Add --seeds, by default 0, 1 and 2. Parsing raises UsageError for a negative seed."""

    def seed(text: str) -> int:
        check_number("--seeds", int(text), NOT_NEGATIVE)
        return int(text)

    parser.add_argument("--seeds", type=seed, nargs="+", default=[0, 1, 2], help="seeds (0 1 2)")


def run(program: str, flags: Flags, *, log: Path, module: str = "prompt_r1") -> None:
    """Run a program of a module with its output in a file. Raises UsageError if it fails."""
    words = [str(part) for flag, values in flags.items() for part in (flag, *values)]
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{program} → {log}", flush=True)
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", module, program, *words]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise UsageError(f"{program} ended with exit code {code}: see {log}; the same command resumes")


def train(folder: Path, steps: int, flags: Flags, *, fault: str = "") -> None:
    """Train an agent, unless it is there; an interrupted training resumes. `fault` is a key of FAULTS."""
    done = [line["step"] for line in read_metrics(folder)]
    if done and max(done) >= steps and (folder / "agent").is_dir():
        return
    program, module = (fault, "prompt_r1.studies.faults") if fault else ("train", "prompt_r1")
    flags = {**flags, "--steps": [steps], "--out": [folder]}
    run(program, flags, log=folder.with_suffix(".log"), module=module)
