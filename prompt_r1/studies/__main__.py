"""`python -m prompt_r1.studies [RUN …]`: EM by training step and by interactions.

Without RUN it studies the mini runs under runs/, the longest of each seed.

`python -m prompt_r1.studies card` is a study of its own, like comparison, failures, passes and seeds.
"""

import argparse
from importlib import import_module
from pathlib import Path

from prompt_r1.agent.names import RUNS
from prompt_r1.cli.command_line import command, program_name, run_program
from prompt_r1.config.fields import POSITIVE, check_number
from prompt_r1.errors import UsageError

OTHERS = ("card", "comparison", "failures", "passes", "seeds")  # modules with a command line of their own


def main(arguments: list[str]) -> None:
    """Make the studies from a command line."""
    if arguments and arguments[0] in OTHERS:
        import_module(f"prompt_r1.studies.{arguments[0]}").main(arguments[1:])
        return
    name = program_name("python -m prompt_r1.studies")
    parser = argparse.ArgumentParser(name, description="\n".join(__doc__.split("\n\n")[1:]))
    parser.add_argument("run", type=Path, nargs="*", help="run folders (the mini runs under runs/)")
    parser.add_argument(
        "--limit", type=int, default=64, help="test questions of each of the five kinds (64: all)"
    )
    given = parser.parse_args(arguments)
    check_number("--limit", given.limit, POSITIVE)

    # Only here: torch takes seconds to import, and `--help` does without.
    import torch

    from prompt_r1.studies.training import training_table
    from prompt_r1.studies.turns import find_runs, load_run, turns_table

    torch.set_num_threads(1)  # more threads do not make a tiny model faster
    folders = given.run or find_runs(RUNS)
    if not folders:
        raise UsageError(
            f"there is no mini run under {RUNS}/ to study: run `{command('train')}`, or give RUN"
        )
    runs = [load_run(folder, per_kind=given.limit) for folder in folders]
    print(f"{', '.join(map(str, folders))}: {sum(len(run.questions) for run in runs)} questions")
    print(f"\n{training_table(folders)}\n\n{turns_table(runs)}")


if __name__ == "__main__":
    run_program(main)
