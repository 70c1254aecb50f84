"""Find the bug: `python -m examples.exercises N` runs a copy of minimal.py with the wrong line of exercise N.

The exercises, their symptoms and their answers are in exercises.md. The program applies the diff of an answer
in reverse.
"""

import argparse
import re
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)


def answers() -> list[str]:
    """The diff of each exercise, from its wrong lines to the right ones."""
    return DIFF.findall((FOLDER / "exercises.md").read_text("utf-8"))


def with_bug(diff: str) -> str:
    """minimal.py with the wrong lines of a diff in place of the right ones."""
    wrong = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith((" ", "-")))
    right = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith((" ", "+")))
    source = (FOLDER / "minimal.py").read_text("utf-8")
    assert source.count(right) == 1, f"minimal.py must have these lines once:\n{right}"
    return source.replace(right, wrong)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False)
    diffs = answers()
    parser.add_argument("number", type=int, choices=range(1, len(diffs) + 1), metavar=f"1-{len(diffs)}")
    parser.add_argument("--steps", type=int, default=10, help="of training (10)")
    settings = parser.parse_args(arguments)
    path = Path("runs") / f"exercise_{settings.number}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(with_bug(diffs[settings.number - 1]), "utf-8")
    print(f"{path} is examples/minimal.py with a bug: find it", flush=True)
    sys.argv = [str(path), "--steps", str(settings.steps)]
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
