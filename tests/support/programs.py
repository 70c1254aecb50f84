"""Runs the entry points as a user does."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import evaluate
import infer
import train
from prompt_r1.evaluation.preflight import read_evaluation
from prompt_r1.pair.settings import InferConfig, read_pair
from prompt_r1.training import report, warm_start
from prompt_r1.training.preflight import read_training
from prompt_r1.training.settings import read_warm_start_config
from tests.support.paths import ROOT

# Settings of a training run of a few seconds: few questions (the start tokenizes each), short games.
SMALL: list[str] = (
    "--questions 2 --group-size 4 --mini-batch 4 --max-new 58 --max-tokens 700 --val-limit 2 --lr 1e-3 "
    "--device cpu"
).split()
FOUR_STEPS = [
    *SMALL,
    *"--data mini:validation --out runs/small --steps 4 --save-every 2 --max-turns 2".split(),
]

# What makes the settings of a program from its arguments, and what runs it with them.
PROGRAMS: dict[str, tuple[Callable[[list[str]], Any], Callable[[Any], None]]] = {
    "train.py": (read_training, train.main),
    "infer.py": (partial(read_pair, InferConfig), infer.main),
    "evaluate.py": (read_evaluation, evaluate.main),
    "report.py": (list, report.main),
    "warm_start.py": (read_warm_start_config, warm_start.main),
}


def run_here(program: str, *line: object) -> None:
    """Run an entry point in this process, which saves the imports. Raises what it raises."""
    read, main = PROGRAMS[program]
    main(read([str(argument) for argument in line]))


def command(script: str, *arguments: str | Path, ranks: int = 0) -> list[str]:
    """The command line of an entry point, under torchrun when `ranks` is given."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(ROOT / script), *map(str, arguments)]


def call(
    folder: Path, *line: str | Path, ranks: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run an entry point in a folder, in a new process. The time limit of the test ends it too."""
    return subprocess.run(
        command(*line, ranks=ranks),
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until a condition holds, while the process runs."""
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


CallHere = Callable[..., subprocess.CompletedProcess[str]]
