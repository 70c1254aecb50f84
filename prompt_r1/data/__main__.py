"""Convert dumps to question files, draw a training mix, check files."""

import argparse
from pathlib import Path
from typing import TypeAlias

from prompt_r1.cli.command_line import Parser, program_name, run_program
from prompt_r1.config.fields import NOT_NEGATIVE, POSITIVE, check_number
from prompt_r1.data.audit import audit_file, audit_report
from prompt_r1.data.convert import convert, write_conversion
from prompt_r1.data.datasets import DATASETS
from prompt_r1.data.files import check_writable, load_questions, write_questions
from prompt_r1.data.hub import HUB_DATA, hub_questions
from prompt_r1.data.mixture import mix, mix_report
from prompt_r1.errors import UsageError
from prompt_r1.terminal import printable

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def main(arguments: list[str]) -> None:
    """Run one of the commands convert, mix and audit."""
    name = program_name("python -m prompt_r1.data")
    parser = Parser(name, description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="convert|mix|audit")
    _add_convert(commands)
    _add_mix(commands)
    _add_audit(commands)
    options = parser.parse_args(arguments)
    options.command(options)


def _add_convert(commands: Commands) -> None:
    parser = commands.add_parser("convert", help="convert a raw dump to a question file", allow_abbrev=False)
    add = parser.add_argument
    names = [*DATASETS, "questions"]
    source = f"{', '.join(DATASETS)}; or questions: a question file, or with the two FIELDs your own table"
    files = "raw files, or with questions hf:ORG/NAME:SPLIT"
    add("--from", dest="source", required=True, choices=names, metavar="DATASET", help=source)
    add("--in", dest="files", required=True, nargs="+", type=Path, metavar="FILE", help=files)
    add("--out", required=True, type=Path, metavar="FILE", help=".jsonl, or .parquet as published")
    add("--one-gold", action="store_true", help="keep only the first gold, as in the published files")
    add("--question-field", default="", metavar="FIELD", help="questions: column of a table of your own")
    add("--answer-field", default="", metavar="FIELD", help="questions: column with the answer, or a list")
    parser.set_defaults(command=_convert)


def _convert(options: argparse.Namespace) -> None:
    check_writable(options.out)
    fields_given = options.question_field or options.answer_field
    if options.source != "questions":
        if fields_given:
            raise UsageError("--question-field and --answer-field are only for --from questions")
        conversion = convert(options.source, options.files, one_gold=options.one_gold)
        print(printable(write_conversion(options.out, conversion, options.files)))
        return
    if len(options.files) > 1 or options.one_gold:
        raise UsageError("--from questions rewrites one file as it is; use `mix` to join several")
    source = str(options.files[0])
    load = hub_questions if source.startswith(HUB_DATA) else load_questions
    question_field = options.question_field or "question"
    questions = load(source, question_field=question_field, answer_field=options.answer_field)
    write_questions(options.out, questions)
    print(f"{options.out}: {len(questions):,} questions")


def _add_mix(commands: Commands) -> None:
    parser = commands.add_parser(
        "mix", help="draw the same number of questions from each dataset", allow_abbrev=False
    )
    add = parser.add_argument
    add("--in", dest="files", required=True, nargs="+", type=Path, metavar="FILE", help="question files")
    add("--out", required=True, type=Path, metavar="FILE", help=".jsonl or .parquet")
    add("--per-dataset", type=int, default=5_120, metavar="N", help="questions per dataset (5120)")
    add("--val-out", type=Path, metavar="FILE", help="also write other questions, for validation")
    add("--val-per-dataset", type=int, default=256, metavar="N", help="of each dataset (256)")
    add("--exclude", nargs="+", default=[], type=Path, metavar="FILE", help="leave out their questions")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw (0)")
    parser.set_defaults(command=_mix)


def _mix(options: argparse.Namespace) -> None:
    check_number("--per-dataset", options.per_dataset, POSITIVE)
    check_number("--val-per-dataset", options.val_per_dataset, POSITIVE)
    outs, sizes = [options.out], [options.per_dataset]
    if options.val_out:
        outs.append(options.val_out)
        sizes.append(options.val_per_dataset)
    for path in outs:
        check_writable(path)
    if not {path.resolve() for path in outs}.isdisjoint(path.resolve() for path in options.files):
        raise UsageError("--out and --val-out must not be among the files of --in")
    questions = [question for path in options.files for question in load_questions(path)]
    excluded = [question for path in options.exclude for question in load_questions(path)]
    result = mix(questions, sizes, seed=options.seed, exclude=excluded)
    for path, part in zip(outs, result.parts, strict=True):
        write_questions(path, part)
        print(f"{path}: {len(part):,} questions")
    print(printable(mix_report(result, sizes)))


def _add_audit(commands: Commands) -> None:
    parser = commands.add_parser("audit", help="find problems in question files", allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="question files")
    parser.add_argument("--examples", type=int, default=5, metavar="N", help="shown of each kind (5)")
    parser.set_defaults(command=_audit)


def _audit(options: argparse.Namespace) -> None:
    check_number("--examples", options.examples, NOT_NEGATIVE)
    audits = [audit_file(path) for path in options.files]
    print(printable(audit_report(audits, examples=options.examples)))
    if any(audit.bad for audit in audits):
        raise SystemExit(1)  # files with bad rows cannot be used for training or evaluation


if __name__ == "__main__":
    run_program(main)
