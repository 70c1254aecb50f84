"""Convert raw dumps to question files, split a file, and draw a training mix."""

if __name__ == "__main__":  # This comes first: the imports below fail if packages are missing.
    from prompt_r1.programs.installation import check_installation

    check_installation()

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prompt_r1.data.datasets import CONVERTED, TRAINED, convert, mix
from prompt_r1.data.files import check_ids, load_questions, write_questions
from prompt_r1.data.questions import hold_out
from prompt_r1.errors import UsageError
from prompt_r1.programs.command_line import Parser, program_name, run_program
from prompt_r1.programs.text import printable
from prompt_r1.settings.fields import POSITIVE, Range, check_number
from prompt_r1.types import Question


def main(arguments: list[str]) -> None:
    """Run one of the commands convert, split and mix."""
    parser = Parser(program_name(), description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="convert|split|mix")
    _add_convert(commands)
    _add_split(commands)
    _add_mix(commands)
    options = parser.parse_args(arguments)
    options.run(options)


def _add_convert(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser("convert", help="convert a raw dump to a question file", allow_abbrev=False)
    command.set_defaults(run=_convert)
    command.add_argument("--from", dest="source", required=True, choices=CONVERTED, help="the dataset")
    sources = "raw files, or hf:ORG/NAME:SPLIT"
    command.add_argument("--in", dest="files", required=True, nargs="+", metavar="FILE", help=sources)
    command.add_argument("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file")


def _convert(options: argparse.Namespace) -> None:
    _check_written(options.out, options.files)
    questions, left_out = convert(options.source, options.files)
    write_questions(options.out, questions)
    print(f"{options.out}: {len(questions):,} questions of {questions[0].dataset}")
    for reason, rows in left_out.most_common():
        print(f"  left out: {rows:,} ({reason})")


def _add_split(commands: "argparse._SubParsersAction[Parser]") -> None:
    about = "divide questions into a file to train on and a file to test with"
    command = commands.add_parser("split", help=about, allow_abbrev=False)
    command.set_defaults(run=_split)
    add = command.add_argument
    add("--in", dest="files", required=True, nargs="+", metavar="FILE", help="question files")
    add("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file to train on")
    add("--test", required=True, type=Path, metavar="FILE", help="a .jsonl file to test with")
    add("--share", type=float, default=0.1, metavar="X", help="share to test with, of each dataset (0.1)")


def _split(options: argparse.Namespace) -> None:
    _check_written(options.out, options.files)
    _check_written(options.test, [*options.files, options.out])
    check_number("--share", options.share, Range(above=0, below=1))
    questions = _questions_of(options.files)
    check_ids(questions)
    count = max(1, round(options.share * len(questions)))
    training, test = hold_out(questions, count)
    write_questions(options.out, training)
    write_questions(options.test, test)
    print(f"{options.out}: {len(training):,} questions to train on")
    print(f"{options.test}: {len(test):,} questions to test with")


def _add_mix(commands: "argparse._SubParsersAction[Parser]") -> None:
    about = "draw the same number of questions from each dataset"
    command = commands.add_parser("mix", help=about, allow_abbrev=False)
    command.set_defaults(run=_mix)
    add = command.add_argument
    add("--in", dest="files", required=True, nargs="+", metavar="FILE", help="question files")
    add("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file")
    add("--per-dataset", type=int, default=5_120, metavar="N", help="questions per dataset (5120)")
    add("--exclude", nargs="+", default=[], metavar="FILE", help="leave out their questions")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw (0)")


def _mix(options: argparse.Namespace) -> None:
    _check_written(options.out, [*options.files, *options.exclude])
    check_number("--per-dataset", options.per_dataset, POSITIVE)
    questions = _questions_of(options.files)
    excluded = _questions_of(options.exclude)
    drawn = mix(questions, options.per_dataset, seed=options.seed, exclude=excluded)
    write_questions(options.out, drawn)
    print(f"{options.out}: {len(drawn):,} questions")
    counts = Counter(question.dataset for question in drawn)
    for dataset in sorted({*counts, *TRAINED}):
        print(printable(f"  {dataset}: {counts[dataset]:,}"))


def _questions_of(files: Sequence[str]) -> list[Question]:
    return [question for path in files for question in load_questions(path)]


def _check_written(path: Path, read: Sequence[str | Path]) -> None:
    """Raise UsageError if a file that is written is also read."""
    files_read = [Path(name).resolve() for name in read]
    if path.resolve() in files_read:
        raise UsageError(f"{path}: a file that is written must not be among the files that are read")


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
