"""`python -m prompt_r1.report RUN`: the report of a run."""

from pathlib import Path

from prompt_r1.cli.command_line import Parser, program_name, run_program
from prompt_r1.report.page import write_report


def main(arguments: list[str]) -> None:
    """Write the report from a command line."""
    parser = Parser(program_name(), description="Write RUN/report.html, the report of a run.")
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/mini-seed0")
    path = write_report(parser.parse_args(arguments).run)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    run_program(main)
