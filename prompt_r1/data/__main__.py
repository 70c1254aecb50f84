"""Convert raw dumps to question files, draw a training mix, check files, or build the paper's data."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from prompt_r1.cli.command_line import program_name, run_program
from prompt_r1.config.fields import NOT_NEGATIVE, POSITIVE, check_number
from prompt_r1.data.audit import audit_file, audit_report
from prompt_r1.data.convert import convert, read_aliases, write_conversion
from prompt_r1.data.datasets import DATASETS, Dataset, squad
from prompt_r1.data.files import TABLES, check_writable, load_questions, write_questions
from prompt_r1.data.mixture import mix, mix_report
from prompt_r1.data.own_tables import read_own_table
from prompt_r1.data.paper import build_paper_data
from prompt_r1.errors import UsageError
from prompt_r1.terminal import printable

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: list[str]) -> None:
    """Run one of the commands convert, mix, audit and paper."""
    parser = argparse.ArgumentParser(
        program_name("python -m prompt_r1.data"), description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="convert|mix|audit|paper")
    _add_convert(commands)
    _add_mix(commands)
    _add_audit(commands)
    _add_paper(commands)
    options = parser.parse_args(arguments)
    options.command(options)


def _add_convert(commands: Commands) -> None:
    parser = commands.add_parser("convert", help="convert a raw dump to a question file", allow_abbrev=False)
    add = parser.add_argument
    names = [*DATASETS, "questions"]
    add(
        "--from",
        dest="source",
        required=True,
        choices=names,
        help="dataset; questions: a question file, or with the two FIELDs a table of your own",
    )
    add("--in", dest="files", required=True, nargs="+", type=Path, metavar="FILE", help="raw files")
    add("--out", required=True, type=Path, metavar="FILE", help=".jsonl, or .parquet as published")
    add("--where", nargs="+", default=[], metavar="FIELD=VALUE", help="keep only such rows, e.g. set=train")
    add("--one-gold", action="store_true", help="keep only the first gold, as in the published files")
    add("--aliases", type=Path, metavar="FILE", help="2wiki: id_aliases.json")
    add("--with-context", action="store_true", help="squad: put the context before the question")
    add("--unanswerable", default="", metavar="TEXT", help="squad: their gold (default: leave them out)")
    add("--question-field", default="", metavar="FIELD", help="questions: column of a table of your own")
    add("--answer-field", default="", metavar="FIELD", help="questions: column with the answer, or a list")
    parser.set_defaults(command=_convert)


def _convert(options: argparse.Namespace) -> None:
    check_writable(options.out)
    if options.source == "questions":
        _rewrite_questions(options)
        return
    if options.question_field or options.answer_field:
        raise UsageError("--question-field and --answer-field are only for --from questions")
    conversion = convert(
        options.source,
        _chosen_dataset(options),
        options.files,
        where=_conditions(options.where),
        aliases=read_aliases(options.aliases) if options.aliases else {},
        one_gold=options.one_gold,
    )
    if not conversion.questions:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in conversion.left_out.items())
        raise UsageError(
            f"{options.files[0]}: none of the {conversion.rows:,} rows is left ({reasons or 'empty'})"
        )
    print(printable(write_conversion(options.out, conversion, options.files)))


def _rewrite_questions(options: argparse.Namespace) -> None:
    if len(options.files) > 1:
        raise UsageError("--from questions rewrites one file; use `mix` to join several")
    path = options.files[0]
    if options.question_field or options.answer_field or path.suffix in TABLES:
        question, answer = options.question_field or "question", options.answer_field or "answer"
        questions = read_own_table(path, question_field=question, answer_field=answer)
    else:
        questions = load_questions(path)
    write_questions(options.out, questions)
    print(f"{options.out}: {len(questions):,} questions")


def _chosen_dataset(options: argparse.Namespace) -> Dataset:
    """The dataset of --from, with its own options. Raises UsageError for options of another dataset."""
    dataset = DATASETS[options.source]
    if options.aliases and options.source != "2wiki":
        raise UsageError("--aliases is only for --from 2wiki")
    if options.source == "squad":
        reader = partial(squad, with_context=options.with_context, unanswerable=options.unanswerable)
        return replace(dataset, convert=reader)
    if options.with_context or options.unanswerable:
        raise UsageError("--with-context and --unanswerable are only for --from squad")
    return dataset


def _conditions(texts: list[str]) -> dict[str, str]:
    """The conditions of --where: field → value."""
    conditions = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not mark:
            raise UsageError("--where needs FIELD=VALUE, e.g. set=train")
        conditions[name] = value
    return conditions


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
    outs, sizes = [options.out], [options.per_dataset]
    if options.val_out:
        outs.append(options.val_out)
        sizes.append(options.val_per_dataset)
    for path in outs:
        check_writable(path)
    check_number("--per-dataset", options.per_dataset, POSITIVE)
    check_number("--val-per-dataset", options.val_per_dataset, POSITIVE)
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
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .parquet")
    parser.add_argument("--examples", type=int, default=5, metavar="N", help="shown of each kind (5)")
    parser.set_defaults(command=_audit)


def _audit(options: argparse.Namespace) -> None:
    check_number("--examples", options.examples, NOT_NEGATIVE)
    audits = [audit_file(path) for path in options.files]
    print(printable(audit_report(audits, examples=options.examples)))
    if any(audit.bad for audit in audits):
        raise SystemExit(1)  # files with bad rows cannot be used for training or evaluation


def _add_paper(commands: Commands) -> None:
    parser = commands.add_parser(
        "paper", help="build the paper's training, validation and test files", allow_abbrev=False
    )
    add = parser.add_argument
    add("--raw", required=True, type=Path, metavar="DIR", help="raw dumps: DIR/NAME/FILE, DIR/eval_data")
    add("--out", required=True, type=Path, metavar="DIR", help="folder of the results")
    add("--per-dataset", type=int, default=5_120, metavar="N", help="training questions per dataset (5120)")
    add("--val-per-dataset", type=int, default=256, metavar="N", help="validation questions (256)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw (0)")
    add("--examples", type=int, default=5, metavar="N", help="findings shown of each kind (5)")
    parser.set_defaults(command=_paper)


def _paper(options: argparse.Namespace) -> None:
    sizes = [options.per_dataset, options.val_per_dataset]
    if min(sizes) < 1:
        raise UsageError("--per-dataset and --val-per-dataset must be at least 1")
    if options.examples < 0:
        raise UsageError(f"--examples must be 0 (none) or more, not {options.examples}")
    data = build_paper_data(
        options.raw, options.out, sizes=sizes, seed=options.seed, examples=options.examples
    )
    print(printable("\n\n".join(data.report)))
    if data.missing:
        print(
            f"\n{len(data.missing)} datasets are missing: fetch the files that the table names, unpack "
            f"archives into {options.raw}/NAME/, and run the same command again."
        )
        raise SystemExit(1)


if __name__ == "__main__":
    run_program(main)
