"""The whole mini job, in this checkout and in another: `python -m benchmarks.mini_job OTHER [--rounds 2]`.

    OMP_NUM_THREADS=1 python -m benchmarks.mini_job ../prompt-r1-before --steps 80

Each round runs `train.py --seed 0` once in each checkout, by this interpreter. The table has the seconds of
every round, and the medians of the other checkout's divided by ours.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import Cost, clock, compare, make_parser, table

HERE = Path(__file__).parent.parent


def train(checkout: Path, steps: int) -> Cost:
    """Run the mini job of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "--seed", "0", "--steps", str(steps), "--out", f"{folder}/run"]
        begin, children = clock(), os.times()
        done = subprocess.run(
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
        )
        wall, after = clock() - begin, os.times()
    if done.returncode:
        sys.exit(f"train.py in {checkout} ended with exit code {done.returncode}:\n{done.stderr}")
    cpu = after.children_user + after.children_system - children.children_user - children.children_system
    return Cost(wall=wall, cpu=cpu)


def main() -> None:
    """Run both checkouts in alternating rounds."""
    parser = make_parser(__doc__)
    parser.add_argument("other", type=Path, help="a checkout to compare with")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2, help="alternating rounds")
    given = parser.parse_args()
    checkouts = {"ours": HERE, str(given.other): given.other.resolve()}
    runs = {name: lambda path=path: train(path, given.steps) for name, path in checkouts.items()}
    print(table(compare(runs, given.rounds)))


if __name__ == "__main__":
    main()
