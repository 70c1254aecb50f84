"""`python -m prompt_r1.studies [RUN …]`: writes runs/studies/{turns,training,distance}.{svg,md}.

Without RUN it studies the mini runs under runs/, the longest of each seed. If there are none, it first trains
one for a few steps.

`python -m prompt_r1.studies options`, `… failures`, `… routes` and `… comparison` are studies of their own.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_r1.agent.names import RUNS
from prompt_r1.cli.command_line import program_name, run_program
from prompt_r1.config.fields import POSITIVE, check_number

if TYPE_CHECKING:
    from prompt_r1.studies.study import Study

FEW_STEPS = 20
OTHERS = ("comparison", "failures", "options", "routes")  # modules with a command line of their own


def main(arguments: list[str]) -> None:
    """Make the studies from a command line."""
    if arguments and arguments[0] in OTHERS:
        import_module(f"prompt_r1.studies.{arguments[0]}").main(arguments[1:])
        return
    name = program_name("python -m prompt_r1.studies")
    parser = argparse.ArgumentParser(name, description="\n".join(__doc__.split("\n\n")[1:]))
    parser.add_argument("run", type=Path, nargs="*", help="run folders (the mini runs under runs/)")
    parser.add_argument("--out", type=Path, help="folder of plots and tables (runs/studies)")
    parser.add_argument(
        "--limit", type=int, default=64, help="test questions of each of the five kinds (64: all)"
    )
    parser.add_argument(
        "--home", choices=("mini", "mini-b"), default="mini", help="environment of the runs' training (mini)"
    )
    parser.add_argument(
        "--train-turns",
        type=int,
        nargs="+",
        metavar="SEED",
        help="instead: train agents for 1 to 4 turns with these seeds (12 runs for 0 1 2), and study them",
    )
    parser.add_argument("--steps", type=int, default=80, help="GRPO steps of --train-turns (80)")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time of --train-turns (2)")
    given = parser.parse_args(arguments)
    for flag in ("limit", "steps", "jobs"):
        check_number(f"--{flag}", getattr(given, flag), POSITIVE)

    # Only here: torch takes seconds to import, and `--help` does without.
    import torch

    torch.set_num_threads(1)  # more threads do not make a tiny model faster
    out = given.out or RUNS / ("studies" if given.home == "mini" else f"studies-{given.home}")
    out.mkdir(parents=True, exist_ok=True)
    if given.train_turns:
        begin = time.perf_counter()
        write(train_and_study(given, out), out, begin)
        return

    from prompt_r1.studies.distance import study_distance
    from prompt_r1.studies.runs import find_runs, load_run
    from prompt_r1.studies.training import study_training
    from prompt_r1.studies.turns import study_turns

    folders = given.run or find_runs(RUNS, given.home) or [train_one(given.home)]
    runs = [load_run(folder, per_kind=given.limit, home=given.home) for folder in folders]
    print(f"{', '.join(map(str, folders))}: {sum(len(run.questions) for run in runs)} questions")
    studies: list[Callable[[], Study]] = [
        partial(study_training, folders),
        partial(study_turns, runs),
        partial(study_distance, runs),
    ]
    for make_study in studies:
        begin = time.perf_counter()
        write(make_study(), out, begin)


def write(study: "Study", out: Path, begin: float) -> None:
    """Write a study's plot and table, and print the table."""
    from prompt_r1.report.svg import svg

    file = out / f"{study.name}.svg"
    file.write_text(svg(study.plot), "utf-8")
    file.with_suffix(".md").write_text(study.markdown(), "utf-8")
    seconds = time.perf_counter() - begin
    print(f"\n{study.plot.title}: {file}, .md ({seconds:.0f} s)\n\n{study.table}")


def train_and_study(given: argparse.Namespace, out: Path) -> "Study":
    """Proposition 1 with agents that are trained for each number of turns."""
    from prompt_r1.studies.trained_turns import play_run, study_trained_turns, train_for_turns

    runs = train_for_turns(out, given.train_turns, steps=given.steps, jobs=given.jobs)
    return study_trained_turns({run: play_run(run, per_kind=given.limit) for run in runs})


def train_one(home: str) -> Path:
    """Train a short mini run in another process."""
    folder = RUNS / f"{home}-seed0"
    line = [sys.executable, "-m", "prompt_r1", "train", "--steps", str(FEW_STEPS), "--env", home]
    subprocess.run([*line, "--out", str(folder)], check=True)
    return folder


if __name__ == "__main__":
    run_program(main)
