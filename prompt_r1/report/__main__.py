"""`python -m prompt_r1.report RUN`: the report of a run."""

from pathlib import Path

from prompt_r1.cli.command_line import Parser, program_name, run_program
from prompt_r1.errors import UsageError
from prompt_r1.report.page import write_report


def main(arguments: list[str]) -> None:
    """Write the report from a command line."""
    parser = Parser(program_name(), description="Write the HTML report of a run.")
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/mini-seed0")
    parser.add_argument("--out", type=Path, help="file to write (RUN/report.html)")
    given = parser.parse_args(arguments)
    if given.out is not None and not given.out.name:
        raise UsageError(f"--out {str(given.out)!r}: give the name of a file")
    path = write_report(given.run, out=given.out)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    run_program(main)
