"""Wrong values for every flag of the programs without a config: data, report, the studies, miniworld.serve.

The flags and their types are read from the parsers of the programs.
"""

import argparse
import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import evaluate
import prompt_r1.miniworld.serve
from prompt_r1.studies import comparison
from prompt_r1.types import Question
from tests.fuzz.sandbox import PROGRAMS, Sandbox
from tests.fuzz.test_fields import NUMBERS, TEXTS
from tests.played import group_of, write_run

pytestmark = pytest.mark.slow

# A complete command of each program or of its command; each case adds one flag.
COMMANDS = {
    "data.py convert": "--from questions --in questions.jsonl --out out.jsonl",
    "data.py mix": "--in questions.jsonl --out out.jsonl --per-dataset 2",
    "data.py audit": "questions.jsonl",
    "report.py": "run",
    "studies.py": "run --limit 1",
    "comparison.py": "--seeds 0 --method direct --limit 1 --out out",
    "miniworld.serve": "--port 0",
}
NOT_COMPLETE = 1  # exit code of audit: there are bad rows


class Found(Exception):
    """Raised in place of parsing."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(main: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser that a program makes."""

    def found(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Found(parser)

    with monkeypatch.context() as patch, pytest.raises(Found) as caught:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", found)
        main([])
    return caught.value.parser


def actions_of(parser: argparse.ArgumentParser, command: str) -> list[argparse.Action]:
    """The flags of a parser, or of one of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[command]._actions
    return parser._actions


def wrong_values(action: argparse.Action) -> Iterator[str]:
    """Values for a flag, most of them wrong."""
    if action.choices:
        yield from ("", "x", next(iter(action.choices)))
    elif action.type is None or action.type is Path:
        yield from TEXTS
    else:
        yield from NUMBERS


def run_here(program: str, flags: Mapping[str, Sequence[object]], *, log: Path) -> None:
    """Run a program of a study in this process. `--limit` keeps it short."""
    words = [str(part) for flag, values in flags.items() for part in (flag, *values)]
    assert program == "evaluate", "the studies here need no agent"
    evaluate.main(words)


async def stop_at_once(port: int, server: object) -> None:
    """In place of serving."""
    await asyncio.sleep(0)


@pytest.mark.parametrize("command", COMMANDS)
def test_any_value_of_any_flag_is_used_or_explained(sandbox: Sandbox, command: str, monkeypatch):
    monkeypatch.setattr(prompt_r1.miniworld.serve, "serve", stop_at_once)
    monkeypatch.setattr(comparison, "run", run_here)
    question = Question("q0", "qa", "Who is it?", ("Anna",))
    write_run(sandbox.folder / "run", [[group_of(question)]])
    sandbox.keep_as_it_is()
    program, *names = command.split()
    cases = 0
    for action in actions_of(parser_of(PROGRAMS[program], monkeypatch), *names or [""]):
        if action.nargs == 0 and action.dest != "help":
            values = [action.option_strings[0]]
        elif action.nargs == 0:
            continue
        else:
            values = list(wrong_values(action))
        for value in values:
            given = [f"{action.option_strings[0]}={value}"] if action.option_strings else [value]
            line = [program, *names, *COMMANDS[command].split(), *([value] if action.nargs == 0 else given)]
            own = ("run", "mine") if action.dest in ("out", "val_out") else ("run",)
            sandbox.run(*line, own=own, ended=(NOT_COMPLETE,) if names else ())
            sandbox.clean()
            cases += 1
    assert cases >= 8
