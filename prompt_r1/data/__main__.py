"""Convert raw dumps to question files, split a file, and draw a training mix."""

if __name__ == "__main__":  # Check before the imports below, which fail where a package is missing.
    from prompt_r1.programs.installation import check_installation

    check_installation()

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from prompt_r1.data.datasets import DATASETS
from prompt_r1.data.files import check_ids, convert, load_questions, write_questions
from prompt_r1.data.questions import hold_out
from prompt_r1.data.sampler import mix
from prompt_r1.errors import UsageError
from prompt_r1.programs.command_line import Parser, program_name, run_program
from prompt_r1.programs.text import printable
from prompt_r1.settings.fields import POSITIVE, Range, check_number
from prompt_r1.types import Question


def main(arguments: list[str]) -> None:
    """Run one of the commands convert, split and mix."""
    parsed, unknown = command_line().parse_known_args(arguments)
    options = vars(parsed)
    command, run = options.pop("command"), options.pop("run")
    if unknown:  # The error of the command's own parser names its help, such as `… convert --help`.
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    run(**options)


def command_line() -> Parser:
    """The flags of the three commands, and the function that runs each command."""
    parser = Parser(program_name(), description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="convert|split|mix")

    def subcommand(name: str, about: str, run: Callable[..., None]) -> Callable[..., object]:
        """Add a command that calls `run`. Returns the function that adds a flag to it."""
        own = commands.add_parser(name, help=about, allow_abbrev=False)
        own.set_defaults(command=own, run=run)
        return own.add_argument

    add = subcommand("convert", "convert a raw dump to a question file", convert_files)
    add("--from", dest="name", required=True, choices=DATASETS, help="the dataset")
    sources = "raw files, or hf:ORG/NAME:SPLIT"
    add("--in", dest="files", required=True, nargs="+", metavar="FILE", help=sources)
    add("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file")

    add = subcommand("split", "divide questions into a file to train on and a file to test with", split_files)
    add("--in", dest="files", required=True, nargs="+", metavar="FILE", help="question files")
    add("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file to train on")
    add("--test", required=True, type=Path, metavar="FILE", help="a .jsonl file to test with")
    add("--share", type=float, default=0.1, metavar="X", help="share to test with, of each dataset (0.1)")

    add = subcommand("mix", "draw the same number of questions from each dataset", mix_files)
    add("--in", dest="files", required=True, nargs="+", metavar="FILE", help="question files")
    add("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file")
    add("--per-dataset", type=int, default=5_120, metavar="N", help="questions per dataset (5120)")
    add("--exclude", nargs="+", default=[], metavar="FILE", help="leave out their questions")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw (0)")
    return parser


def convert_files(*, name: str, files: Sequence[str], out: Path) -> None:
    """Write the questions of raw files of a dataset to `out`, and print what was left out."""
    _check_written(out, files)
    questions, left_out = convert(name, files)
    write_questions(out, questions)
    print(f"{out}: {len(questions):,} questions of {questions[0].dataset}")
    for reason, rows in left_out.most_common():
        print(f"  left out: {rows:,} ({reason})")


def split_files(*, files: Sequence[str], out: Path, test: Path, share: float) -> None:
    """Write a share of the questions to `test`, and the others to `out`."""
    _check_written(out, files)
    _check_written(test, [*files, out])
    check_number("--share", share, Range(above=0, below=1))
    questions = _questions_of(files)
    check_ids(questions)
    count = max(1, round(share * len(questions)))
    training, held_out = hold_out(questions, count)
    write_questions(out, training)
    write_questions(test, held_out)
    print(f"{out}: {len(training):,} questions to train on")
    print(f"{test}: {len(held_out):,} questions to test with")


def mix_files(
    *, files: Sequence[str], out: Path, per_dataset: int, exclude: Sequence[str], seed: int
) -> None:
    """Write a random draw of the questions to `out`, without the questions of the files in `exclude`."""
    _check_written(out, [*files, *exclude])
    check_number("--per-dataset", per_dataset, POSITIVE)
    questions = _questions_of(files)
    drawn = mix(questions, per_dataset, seed=seed, exclude=_questions_of(exclude))
    write_questions(out, drawn)
    print(f"{out}: {len(drawn):,} questions")
    counts = Counter(question.dataset for question in drawn)
    # A dataset whose questions are all in `exclude` has a line, too, with 0.
    for dataset in sorted({question.dataset for question in questions}):
        print(printable(f"  {dataset}: {counts[dataset]:,}"))


def _questions_of(files: Sequence[str]) -> list[Question]:
    return [question for path in files for question in load_questions(path)]


def _check_written(path: Path, read: Sequence[str | Path]) -> None:
    """Raise UsageError for a file that cannot be written, and for one that is also read."""
    if path.suffix != ".jsonl":
        raise UsageError(f"{path}: only .jsonl files can be written")
    files_read = [Path(name).resolve() for name in read]
    if path.resolve() in files_read:
        raise UsageError(f"{path}: a file that is written must not be among the files that are read")


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
