"""`python -m prompt_r1.studies [RUN …]`: writes runs/studies/{turns,training,distance}.{svg,md}.

Without RUN it studies the mini runs under runs/, the longest of each seed. If there are none, it first trains
one for a few steps.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prompt_r1.agent.names import RUNS
from prompt_r1.cli.command_line import program_name, run_program
from prompt_r1.config.fields import POSITIVE, check_number

FEW_STEPS = 20


def main(arguments: list[str]) -> None:
    """Make the studies from a command line."""
    name = program_name("python -m prompt_r1.studies")
    parser = argparse.ArgumentParser(name, description=__doc__.split("\n\n")[1])
    parser.add_argument("run", type=Path, nargs="*", help="run folders (the mini runs under runs/)")
    parser.add_argument("--out", type=Path, default=RUNS / "studies", help="folder of plots and tables")
    parser.add_argument(
        "--limit", type=int, default=64, help="test questions of each of the five kinds (64: all)"
    )
    given = parser.parse_args(arguments)
    check_number("--limit", given.limit, POSITIVE)

    # Only here: torch takes seconds to import, and `--help` does without.
    import torch

    from prompt_r1.report.svg import svg
    from prompt_r1.studies.distance import study_distance
    from prompt_r1.studies.runs import find_runs, load_run
    from prompt_r1.studies.study import Study
    from prompt_r1.studies.training import study_training
    from prompt_r1.studies.turns import study_turns

    torch.set_num_threads(1)  # more threads do not make a tiny model faster
    folders = given.run or find_runs(RUNS) or [train_one()]
    runs = [load_run(folder, per_kind=given.limit) for folder in folders]
    print(f"{', '.join(map(str, folders))}: {sum(len(run.questions) for run in runs)} questions")
    given.out.mkdir(parents=True, exist_ok=True)
    studies: list[Callable[[], Study]] = [
        partial(study_training, folders),
        partial(study_turns, runs),
        partial(study_distance, runs),
    ]
    for make_study in studies:
        begin = time.perf_counter()
        study = make_study()
        file = given.out / f"{study.name}.svg"
        file.write_text(svg(study.plot), "utf-8")
        file.with_suffix(".md").write_text(study.markdown(), "utf-8")
        seconds = time.perf_counter() - begin
        print(f"\n{study.plot.title}: {file}, .md ({seconds:.0f} s)\n\n{study.table}")


def train_one() -> Path:
    """Train a short mini run in another process."""
    line = [sys.executable, "-m", "prompt_r1", "train", "--steps", str(FEW_STEPS)]
    subprocess.run(line, check=True)
    return RUNS / "mini-seed0"


if __name__ == "__main__":
    run_program(main)
