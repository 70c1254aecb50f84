"""`python -m prompt_r1.report RUN [OTHER]`: the report of one run or two."""

from pathlib import Path

from prompt_r1.cli.command_line import Parser, program_name, run_program
from prompt_r1.config.fields import POSITIVE, check_number
from prompt_r1.errors import UsageError
from prompt_r1.report.page import GAMES, write_report


def main(arguments: list[str]) -> None:
    """Write the report from a command line."""
    about = "Write the HTML report of a run, or one that compares two runs."
    parser = Parser(program_name("python -m prompt_r1.report"), description=about)
    parser.add_argument("run", type=Path, help="folder of a run or of an evaluation, such as runs/mini-seed0")
    parser.add_argument("other", type=Path, nargs="?", help="another folder, to compare with")
    parser.add_argument(
        "--out", type=Path, help="file to write (RUN/report.html, or RUN/report-with-OTHER.html)"
    )
    parser.add_argument("--games", type=int, default=GAMES, help=f"most games shown of each run ({GAMES})")
    given = parser.parse_args(arguments)
    check_number("--games", given.games, POSITIVE)
    if given.out is not None and not given.out.name:
        raise UsageError(f"--out {str(given.out)!r}: give the name of a file")
    path = write_report(given.run, given.other, out=given.out, games=given.games)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    run_program(main)
