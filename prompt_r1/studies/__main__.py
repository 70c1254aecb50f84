"""`python -m prompt_r1.studies [RUN …]`: writes runs/studies/{turns,training,distance}.{svg,md}.

Without RUN the mini runs under runs/ are studied, the longest of each seed; where there is none, one is
trained for a few steps first.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from prompt_r1.agent.names import RUNS
from prompt_r1.cli.command_line import run_program
from prompt_r1.studies.distance import study_distance
from prompt_r1.studies.figure import Study, svg
from prompt_r1.studies.runs import find_runs, load_run
from prompt_r1.studies.training import study_training
from prompt_r1.studies.turns import study_turns

FEW_STEPS = 20


def main(arguments: list[str]) -> None:
    """Make the studies from a command line."""
    parser = argparse.ArgumentParser("python -m prompt_r1.studies", description=__doc__.split("\n\n")[1])
    parser.add_argument("run", type=Path, nargs="*", help="run folders (the mini runs under runs/)")
    parser.add_argument("--out", type=Path, default=RUNS / "studies", help="folder of plots and tables")
    parser.add_argument(
        "--limit", type=int, default=64, help="test questions of each of the five kinds (64: all)"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more help a tiny model little
    folders = given.run or find_runs(RUNS) or [train_one()]
    runs = [load_run(folder, per_kind=given.limit) for folder in folders]
    print(f"{', '.join(map(str, folders))}: {sum(len(one.questions) for one in runs)} questions")
    given.out.mkdir(parents=True, exist_ok=True)
    for make in (lambda: study_training(folders), lambda: study_turns(runs), lambda: study_distance(runs)):
        begin = time.perf_counter()
        study = make()
        write(study, given.out)
        seconds = time.perf_counter() - begin
        print(f"\n{study.title}: {given.out / study.name}.svg, .md ({seconds:.0f} s)\n\n{study.table}")


def train_one() -> Path:
    """A short mini run, in a process of its own."""
    script = Path(__file__).parents[2] / "train.py"
    subprocess.run([sys.executable, str(script), "--steps", str(FEW_STEPS)], check=True)
    return RUNS / "mini-seed0"


def write(study: Study, folder: Path) -> None:
    """The study's plot (SVG) and table (Markdown)."""
    (folder / f"{study.name}.svg").write_text(svg(study), "utf-8")
    (folder / f"{study.name}.md").write_text(study.markdown(), "utf-8")


if __name__ == "__main__":
    run_program(main)
