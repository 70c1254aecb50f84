"""`python -m prompt_r1.data convert|mix|audit`: make files of questions, and look at what is in them."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from prompt_r1.cli.command_line import run_program
from prompt_r1.data.audit import audit_file, report
from prompt_r1.data.convert import convert, read_aliases, write_conversion
from prompt_r1.data.files import check_writable, load_questions, write_questions
from prompt_r1.data.mixture import mix
from prompt_r1.data.mixture import report as mix_report
from prompt_r1.data.sources import SOURCES, squad
from prompt_r1.errors import UsageError


def main(arguments: list[str]) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser("python -m prompt_r1.data", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="convert|mix|audit")
    for add in (_add_convert, _add_mix, _add_audit):
        add(commands)
    given = parser.parse_args(arguments)
    given.command(given)


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_convert(commands: Commands) -> None:
    parser = commands.add_parser("convert", help="a raw dump → a file of questions", allow_abbrev=False)
    add = parser.add_argument
    named = [*SOURCES, "questions"]
    add("--from", dest="source", required=True, choices=named, help="questions: .jsonl or published .parquet")
    add("--in", dest="files", required=True, nargs="+", type=Path, metavar="FILE", help="as it ships")
    add("--out", required=True, type=Path, metavar="FILE", help=".jsonl, or .parquet as the published files")
    add("--where", nargs="+", default=[], metavar="FIELD=VALUE", help="only such rows, e.g. set=train")
    add("--one-gold", action="store_true", help="without aliases, as the published files")
    add("--aliases", type=Path, metavar="FILE", help="2wiki: id_aliases.json")
    add("--with-context", action="store_true", help="squad: the context before the question")
    add("--unanswerable", default="", metavar="TEXT", help="squad: their gold; else they are left out")
    parser.set_defaults(command=_convert)


def _convert(given: argparse.Namespace) -> None:
    check_writable(given.out)
    if given.source == "questions":
        if len(given.files) > 1:
            raise UsageError("--from questions rewrites one file; `mix` joins several")
        questions = load_questions(given.files[0])
        write_questions(given.out, questions)
        print(f"{given.out}: {len(questions):,} questions")
        return
    source = SOURCES[given.source]
    if given.source == "squad":
        reading = partial(squad, with_context=given.with_context, unanswerable=given.unanswerable)
        source = replace(source, convert=reading)
    elif given.with_context or given.unanswerable:
        raise UsageError("--with-context and --unanswerable are for --from squad")
    if given.aliases and given.source != "2wiki":
        raise UsageError("--aliases is for --from 2wiki")
    pairs = [condition.partition("=") for condition in given.where]
    if not all(mark for _, mark, _ in pairs):
        raise UsageError("--where wants FIELD=VALUE, e.g. set=train")
    conversion = convert(
        given.source,
        source,
        given.files,
        where={name: value for name, _, value in pairs},
        aliases=read_aliases(given.aliases) if given.aliases else {},
        one_gold=given.one_gold,
    )
    if not conversion.questions:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in conversion.left_out.items())
        raise UsageError(
            f"{given.files[0]}: no question is left of {conversion.rows:,} rows ({reasons or 'empty'})"
        )
    print(write_conversion(given.out, conversion, given.files))


def _add_mix(commands: Commands) -> None:
    parser = commands.add_parser("mix", help="as many questions of each dataset", allow_abbrev=False)
    add = parser.add_argument
    add("--in", dest="files", required=True, nargs="+", type=Path, metavar="FILE")
    add("--out", required=True, type=Path, metavar="FILE")
    add("--per-dataset", type=int, default=5_120, metavar="N", help="questions of each (5120)")
    add("--val-out", type=Path, metavar="FILE", help="other questions, for validation")
    add("--val-per-dataset", type=int, default=256, metavar="N", help="of each (256)")
    add("--exclude", nargs="+", default=[], type=Path, metavar="FILE", help="none of these questions")
    add("--seed", type=int, default=0, metavar="N", help="(0)")
    parser.set_defaults(command=_mix)


def _mix(given: argparse.Namespace) -> None:
    outs = [given.out, *([given.val_out] if given.val_out else [])]
    sizes = [given.per_dataset, given.val_per_dataset][: len(outs)]
    for path in outs:
        check_writable(path)
    if min(sizes) < 1:
        raise UsageError("--per-dataset and --val-per-dataset must be at least 1")
    if not {path.resolve() for path in outs}.isdisjoint(path.resolve() for path in given.files):
        raise UsageError("--out and --val-out must not be among the files of --in")
    questions = [question for path in given.files for question in load_questions(path)]
    excluded = [question for path in given.exclude for question in load_questions(path)]
    result = mix(questions, sizes, seed=given.seed, exclude=excluded)
    for path, part in zip(outs, result.parts, strict=True):
        write_questions(path, part)
        print(f"{path}: {len(part):,} questions")
    print(mix_report(result, sizes))


def _add_audit(commands: Commands) -> None:
    parser = commands.add_parser("audit", help="what is wrong with files of questions", allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .parquet")
    parser.add_argument("--examples", type=int, default=5, metavar="N", help="shown of each finding (5)")
    parser.set_defaults(command=_audit)


def _audit(given: argparse.Namespace) -> None:
    audits = [audit_file(path) for path in given.files]
    print(report(audits, examples=given.examples))
    if any(audit.bad for audit in audits):
        raise SystemExit(1)  # such a file cannot be trained on or evaluated


if __name__ == "__main__":
    run_program(main)
