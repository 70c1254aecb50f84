"""Wrong values for every flag of every program, and for every key of a config file.

The flags and their types are read from the parsers of the programs.
"""

import argparse
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import uvicorn
import yaml

from prompt_r1.config.train import TrainConfig
from prompt_r1.types import Question
from tests.support.played import group_of, write_run
from tests.support.sandbox import PROGRAMS, Sandbox

pytestmark = pytest.mark.slow

NUMBERS = ["", "x", "true", "2.7", "nan", "inf", "-1", "0", "1e308", "1e-320", str(2**62), "9" * 400]
TEXTS = ["", "\udcff", "\x1b[2J", "x" * 5000, "/dev/null", "mine", "mine/notes.txt", "meta", "{", "3"]
TEXTS += ["hf:mine", "a@http://127.0.0.1:9/v1"]
YAML_VALUES = [None, True, 2.7, -1, 10**30, float("nan"), "x", "", [], [None], [[1]], {"a": 1}, "a\0b"]

ONE_STEP = "--config mini --agent agent --env mini --data questions.jsonl --out out --steps 1 --questions 2"
ONE_STEP += " --group-size 2 --mini-batch 4 --max-turns 1 --max-new 16 --max-tokens 500 --instruction short"
ONE_STEP += " --val-data none --test-data none --device cpu"
SFT = "--agent agent --data questions.jsonl --epochs 1 --out out --device cpu"
EVALUATE = "--agent agent --env mini --data questions.jsonl --limit 1 --train-data questions.jsonl "
EVALUATE += "--val-data questions.jsonl --optimize-calls 6 --out out --device cpu"
# A complete command of each program or of its command; each case adds one flag.
COMMANDS = {
    "train.py": ONE_STEP,
    "infer.py": "--agent agent --env mini --question abc? --device cpu",
    "evaluate.py": EVALUATE,
    "sft.py": SFT,
    "serving": "--agent agent --env mini --port 0 --device cpu",
    "data.py convert": "--from questions --in questions.jsonl --out out.jsonl",
    "data.py mix": "--in questions.jsonl --out out.jsonl --per-dataset 2",
    "data.py audit": "questions.jsonl",
    "report.py": "run",
}
CONFIGURED = ("train.py", "infer.py", "evaluate.py", "sft.py", "serving")
NOT_COMPLETE = 1  # exit code of audit: there are bad rows
# The method that uses a field of evaluate.py, by the beginning of its name; direct uses the others. Flags of
# rft are only read: they say how long it plays.
METHOD_OF = {
    **{"optim": "opro", "sft": "sft", "grpo": "grpo-only"},
    **{"agent": "prompt-r1", "temperature": "prompt-r1", "kv_tokens": "prompt-r1", "device": "prompt-r1"},
}


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


def arguments_of(action: argparse.Action) -> Iterator[str]:
    """A flag with each of its values, most of them wrong."""
    name = action.option_strings[0] + "=" if action.option_strings else ""
    if action.nargs == 0:
        yield from () if action.dest == "help" else (action.option_strings[0], f"{name}x")
    elif action.choices:
        yield from (f"{name}{value}" for value in ("", "x", next(iter(action.choices))))
    else:
        is_text = action.type in (None, str, Path)
        yield from (f"{name}{value}" for value in (TEXTS if is_text else NUMBERS))


async def close_at_once(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    """In place of serving: nothing but closing what was opened."""
    for listener in sockets:
        listener.close()


@pytest.mark.parametrize("command", COMMANDS)
def test_any_value_of_any_flag_is_used_or_explained(sandbox: Sandbox, command: str, monkeypatch):
    monkeypatch.setattr(uvicorn.Server, "serve", close_at_once)
    question = Question("q0", "qa", "Who is it?", ("Anna",))
    write_run(sandbox.folder / "run", [[group_of(question)]])
    sandbox.keep_as_it_is()
    program, *names = command.split()
    # These flags name a file or folder to replace; those of the programs with a config refuse to.
    replaced = ("save",) if program in CONFIGURED else ("out", "val_out")
    cases = 0
    for action in actions_of(parser_of(PROGRAMS[program], monkeypatch), *names or [""]):
        for argument in arguments_of(action):
            line = [program, *names, *COMMANDS[command].split(), argument]
            if program == "evaluate.py" and action.dest not in ("method", "tables"):
                method = next((METHOD_OF[s] for s in METHOD_OF if action.dest.startswith(s)), "direct")
                line += ["--method", method]
            own = ("run", "mine") if action.dest in replaced else ("run",)
            sandbox.run(*line, own=own, ended=(NOT_COMPLETE,) if names else ())
            sandbox.clean()
            cases += 1
    assert cases >= 8


def test_any_value_of_any_key_of_a_config_file_is_used_or_explained(sandbox: Sandbox):
    file = sandbox.folder / "mine/own.yaml"
    for f in fields(TrainConfig):
        for value in YAML_VALUES:
            file.write_text(yaml.safe_dump({f.name: value}))
            sandbox.run("train.py", "--config", "mine/own.yaml", "--data", "mini", "--dry-run")
