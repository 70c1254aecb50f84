"""`python -m prompt_r1.report RUN [RUN2]`: RUN/report.html, or one page that compares two runs."""

import argparse
from pathlib import Path

from prompt_r1.cli.command_line import run_program
from prompt_r1.report.page import GAMES, write_report


def main(arguments: list[str]) -> None:
    """Write the report from a command line."""
    parser = argparse.ArgumentParser("python -m prompt_r1.report", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder, such as runs/mini-seed0")
    parser.add_argument("other", type=Path, nargs="?", help="another run folder, to compare")
    parser.add_argument("--out", type=Path, help="the file (RUN/report.html, or RUN/report-with-RUN2.html)")
    parser.add_argument(
        "--games", type=int, default=GAMES, help=f"games of each run at most, whole steps ({GAMES})"
    )
    given = parser.parse_args(arguments)
    path = write_report(given.run, given.other, out=given.out, games=given.games)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    run_program(main)
