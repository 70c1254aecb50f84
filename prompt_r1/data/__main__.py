"""Convert raw dumps to question files, split a file, and draw a training mix."""

if __name__ == "__main__":  # This comes first: the imports below fail if packages are missing.
    from prompt_r1.programs.installation import check_installation

    check_installation()

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prompt_r1.data.datasets import CONVERTED, TRAINED, convert, mix, write_questions
from prompt_r1.data.files import load_questions
from prompt_r1.data.questions import hold_out
from prompt_r1.errors import UsageError
from prompt_r1.programs.command_line import Parser, program_name, run_program
from prompt_r1.programs.text import printable
from prompt_r1.settings.fields import POSITIVE, Range, check_number


def main(arguments: list[str]) -> None:
    """Run one of the commands convert, split and mix."""
    parser = Parser(program_name(), description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="convert|split|mix")

    command = commands.add_parser("convert", help="convert a raw dump to a question file", allow_abbrev=False)
    command.set_defaults(run=_convert)
    add = command.add_argument
    add("--from", dest="source", required=True, choices=CONVERTED, help="the dataset")
    sources = "raw files, or hf:ORG/NAME:SPLIT"
    add("--in", dest="files", required=True, nargs="+", metavar="FILE", help=sources)
    add("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file")

    about = "divide questions into a file to train on and a file to test with"
    command = commands.add_parser("split", help=about, allow_abbrev=False)
    command.set_defaults(run=_split)
    add = command.add_argument
    add("--in", dest="files", required=True, nargs="+", metavar="FILE", help="question files")
    add("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file to train on")
    add("--test", required=True, type=Path, metavar="FILE", help="a .jsonl file to test with")
    add("--share", type=float, default=0.1, metavar="X", help="share to test with, of each dataset (0.1)")

    about = "draw the same number of questions from each dataset"
    command = commands.add_parser("mix", help=about, allow_abbrev=False)
    command.set_defaults(run=_mix)
    add = command.add_argument
    add("--in", dest="files", required=True, nargs="+", metavar="FILE", help="question files")
    add("--out", required=True, type=Path, metavar="FILE", help="a .jsonl file")
    add("--per-dataset", type=int, default=5_120, metavar="N", help="questions per dataset (5120)")
    add("--exclude", nargs="+", default=[], metavar="FILE", help="leave out their questions")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw (0)")

    options = parser.parse_args(arguments)
    options.run(options)


def _check_written(path: Path, read: Sequence[str | Path]) -> None:
    """Raise UsageError if a file that is written is also read."""
    files_read = [Path(name).resolve() for name in read]
    if path.resolve() in files_read:
        raise UsageError(f"{path}: a file that is written must not be among the files that are read")


def _convert(options: argparse.Namespace) -> None:
    _check_written(options.out, options.files)
    questions, left_out = convert(options.source, options.files)
    write_questions(options.out, questions)
    print(f"{options.out}: {len(questions):,} questions of {questions[0].dataset}")
    for reason, rows in left_out.most_common():
        print(f"  left out: {rows:,} ({reason})")


def _split(options: argparse.Namespace) -> None:
    _check_written(options.out, options.files)
    _check_written(options.test, [*options.files, options.out])
    check_number("--share", options.share, Range(above=0, below=1))
    questions = [question for path in options.files for question in load_questions(path)]
    for identity, count in Counter(question.id for question in questions).items():
        if count > 1:  # The files that are written could not be read again.
            raise UsageError(f"--in: the id {identity!r} occurs in two files; give each question once")
    count = max(1, round(options.share * len(questions)))
    training, test = hold_out(questions, count)
    write_questions(options.out, training)
    write_questions(options.test, test)
    print(f"{options.out}: {len(training):,} questions to train on")
    print(f"{options.test}: {len(test):,} questions to test with")


def _mix(options: argparse.Namespace) -> None:
    _check_written(options.out, [*options.files, *options.exclude])
    check_number("--per-dataset", options.per_dataset, POSITIVE)
    questions = [question for path in options.files for question in load_questions(path)]
    excluded = [question for path in options.exclude for question in load_questions(path)]
    drawn = mix(questions, options.per_dataset, seed=options.seed, exclude=excluded)
    write_questions(options.out, drawn)
    print(f"{options.out}: {len(drawn):,} questions")
    counts = Counter(question.dataset for question in drawn)
    for dataset in sorted({*counts, *TRAINED}):
        print(printable(f"  {dataset}: {counts[dataset]:,}"))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
