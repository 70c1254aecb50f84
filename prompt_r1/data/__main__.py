"""Convert raw dumps to question files, split a file, and draw a training mix."""

if __name__ == "__main__":  # Check before the imports below, which fail where a package is missing.
    from prompt_r1.programs.installation import check_installation

    check_installation()

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.datasets import DATASETS, LeftOut
from prompt_r1.data.files import id_from_text, load_questions, question_key, write_questions
from prompt_r1.data.questions import hold_out
from prompt_r1.data.rows import BadRow, fields_of, read_rows
from prompt_r1.errors import UsageError, first_line
from prompt_r1.programs.command_line import Parser, program_name, run_program
from prompt_r1.programs.text import printable
from prompt_r1.types import Question


def main(arguments: list[str]) -> None:
    """Run one of the commands convert, split and mix."""
    options = vars(command_line().parse_args(arguments))
    run = options.pop("run")
    run(**options)


def command_line() -> Parser:
    """The flags of the three commands, and the function that runs each command."""
    every = Parser(add_help=False)  # the flags that every command has
    sources = "question files; for convert raw files, or hf:ORG/NAME:SPLIT"
    every.add_argument("--in", dest="files", required=True, nargs="+", metavar="FILE", help=sources)
    every.add_argument("--out", required=True, type=Path, metavar="FILE", help="the .jsonl file to write")

    parser = Parser(program_name(), description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="convert|split|mix")

    about = "convert a raw dump to a question file"
    command = commands.add_parser("convert", parents=[every], help=about, allow_abbrev=False)
    command.set_defaults(run=convert_files)
    command.add_argument("--from", dest="name", required=True, choices=DATASETS, help="the dataset")

    about = "divide questions into a file to train on (--out) and a file to test with"
    command = commands.add_parser("split", parents=[every], help=about, allow_abbrev=False)
    command.set_defaults(run=split_files)
    test = "the .jsonl file to test with"
    command.add_argument("--test", required=True, type=Path, metavar="FILE", help=test)
    share = "share to test with, of each dataset (0.1)"
    command.add_argument("--share", type=float, default=0.1, metavar="X", help=share)

    about = "draw the same number of questions from each dataset"
    command = commands.add_parser("mix", parents=[every], help=about, allow_abbrev=False)
    command.set_defaults(run=mix_files)
    per_dataset = "questions per dataset (5120)"
    command.add_argument("--per-dataset", type=int, default=5_120, metavar="N", help=per_dataset)
    command.add_argument("--exclude", nargs="+", default=[], metavar="FILE", help="leave out their questions")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draw (0)")
    return parser


def convert_files(*, name: str, files: Sequence[str], out: Path) -> None:
    """Write the questions of raw files of a dataset to `out`, and print what was left out."""
    _check_written(out, files)
    questions, left_out = convert(name, files)
    write_questions(out, questions)
    print(f"{out}: {len(questions):,} questions of {questions[0].dataset}")
    for reason, rows in left_out.most_common():
        print(f"  left out: {rows:,} ({reason})")


def convert(name: str, files: Sequence[str]) -> tuple[list[Question], Counter[str]]:
    """Convert raw dumps of a dataset. Returns the questions without repeats, and what was left out.

    The rows that were left out are counted by reason. Raises UsageError with the file, the row and the
    reason, and if no question is left.
    """
    dataset = DATASETS[name]
    questions: dict[str, Question] = {}  # question_key → question
    left_out: Counter[str] = Counter()
    for file in files:
        for number, row in read_rows(file):
            try:
                text, golds = dataset.convert(fields_of(row))
            except LeftOut as reason:
                left_out[str(reason)] += 1
                continue
            except (BadRow, LookupError, TypeError, ValueError, RecursionError) as error:
                problem = f"not a row of {dataset.name}: {first_line(error)}"
                raise UsageError(f"{file}, row {number}: {problem}") from None
            key = question_key(text)
            if key in questions:
                left_out["asked before"] += 1
            else:
                questions[key] = Question(id_from_text(text), dataset.name, text, golds, dataset.kind)
    if not questions:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "no rows"
        raise UsageError(f"{files[0]}: no question is left ({reasons})")
    return list(questions.values()), left_out


def split_files(*, files: Sequence[str], out: Path, test: Path, share: float) -> None:
    """Write a share of the questions to `test`, and the others to `out`."""
    _check_written(out, files)
    _check_written(test, [*files, out])
    if not 0 < share < 1:
        raise UsageError(f"--share must be between 0 and 1, not {share}")
    questions = _questions_of(files)
    # A file with the same id twice could not be read again.
    for identity, occurrences in Counter(question.id for question in questions).items():
        if occurrences > 1:
            raise UsageError(f"the id {identity!r} occurs in two files; give each question once")
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
    if per_dataset < 1:
        raise UsageError(f"--per-dataset must be at least 1, not {per_dataset}")
    questions = _questions_of(files)
    drawn = mix(questions, per_dataset, seed=seed, exclude=_questions_of(exclude))
    write_questions(out, drawn)
    print(f"{out}: {len(drawn):,} questions")
    counts = Counter(question.dataset for question in drawn)
    # A dataset whose questions are all in `exclude` has a line, too, with 0.
    for dataset in sorted({question.dataset for question in questions}):
        print(printable(f"  {dataset}: {counts[dataset]:,}"))


def mix(
    questions: Sequence[Question], per_dataset: int, *, seed: int, exclude: Sequence[Question]
) -> list[Question]:
    """Draw `per_dataset` random questions of each dataset, in random order.

    Questions that differ only in case or white space count as one, and questions in `exclude` (the test
    files) are never drawn.
    """
    seen = {question_key(question.text) for question in exclude}
    ids: set[str] = set()
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        key = question_key(question.text)
        if key in seen:
            continue
        if question.id in ids:  # Two datasets may use the same ids.
            question = replace(question, id=id_from_text(question.text))
        seen.add(key)
        ids.add(question.id)
        by_dataset.setdefault(question.dataset, []).append(question)
    drawn: list[Question] = []
    for dataset, candidates in sorted(by_dataset.items()):
        random.Random(f"mix {seed} {dataset}").shuffle(candidates)
        drawn += candidates[:per_dataset]
    random.Random(f"mix {seed} 0").shuffle(drawn)
    return drawn


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
