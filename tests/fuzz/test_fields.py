"""Wrong values for every declared field of every program, on the command line and in YAML files."""

import socket
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, get_args, get_origin

import pytest
import uvicorn
import yaml

from infer import InferConfig
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.fields import flag_of
from prompt_r1.config.methods import SftConfig
from prompt_r1.config.serve import ServeConfig
from prompt_r1.config.train import TrainConfig
from tests.fuzz.sandbox import Sandbox

pytestmark = pytest.mark.slow

NUMBERS = ["", "x", "2.7", "nan", "inf", "-1", "0", "1e308", "1e-320", str(2**62), "9" * 400]
TEXTS = ["", "\udcff", "\x1b[2J", "x" * 5000, "/dev/null", "mine", "mine/notes.txt", "meta", "{", "3"]
TEXTS += ["hf:mine", "a@http://127.0.0.1:9/v1"]
YAML_VALUES = [None, True, 2.7, -1, 10**30, float("nan"), "x", "", [], [None], [[1]], {"a": 1}, "a\0b"]

TRAIN = "--config mini --agent agent --env mini --data questions.jsonl --out out --steps 1 --questions 2"
TRAIN += " --group-size 2 --mini-batch 4 --max-turns 1 --max-new 16 --max-tokens 500 --instruction short"
TRAIN += " --val-data none --test-data none"
COMMANDS = {
    "train.py": (TrainConfig, f"{TRAIN} --device cpu"),
    "infer.py": (InferConfig, "--agent agent --env mini --question abc? --device cpu"),
    "evaluate.py": (
        EvaluateConfig,
        "--agent agent --env mini --data questions.jsonl --limit 1 --train-data questions.jsonl "
        "--val-data questions.jsonl --optimize-calls 6 --out out --device cpu",
    ),
    "sft.py": (SftConfig, "--agent agent --data questions.jsonl --epochs 1 --out out --device cpu"),
    "serving": (ServeConfig, "--agent agent --env mini --port 0 --device cpu"),
}
# The method that uses a field of evaluate.py, by the beginning of its name; direct uses the others. Flags of
# rft are only read: they say how long it plays.
METHOD_OF = {
    **{"opro": "opro", "optim": "opro", "seed_prompt": "opro", "textgrad": "textgrad", "gepa": "gepa"},
    **{"sft": "sft", "grpo": "grpo-only", "shots": "cot-few-shot", "samples": "self-consistency"},
    **{"agent": "prompt-r1", "temperature": "prompt-r1", "kv_tokens": "prompt-r1", "device": "prompt-r1"},
}


def wrong_values(f: Field[Any]) -> list[str]:
    """Values for a field, most of them wrong."""
    kind = get_args(f.type)[0] if get_origin(f.type) is tuple else f.type
    if f.metadata["choices"] or kind is bool:
        return ["", "x", "true", "1"]
    return NUMBERS if kind in (int, float) else TEXTS


async def stop_at_once(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    """In place of serving: nothing but closing what was opened."""
    for listener in sockets:
        listener.close()


@pytest.mark.parametrize("program", COMMANDS)
def test_any_value_of_any_flag_is_used_or_explained(sandbox: Sandbox, program: str, monkeypatch):
    monkeypatch.setattr(uvicorn.Server, "serve", stop_at_once)
    kind, command = COMMANDS[program]
    for f in fields(kind):
        for value in wrong_values(f):
            own = ("mine",) if f.name == "save" else ()  # it names a file to replace
            line = [*command.split(), f"{flag_of(f.name)}={value}"]
            if program == "evaluate.py" and f.name not in ("method", "tables"):
                line += [
                    "--method",
                    next((METHOD_OF[s] for s in METHOD_OF if f.name.startswith(s)), "direct"),
                ]
            sandbox.run(program, *line, own=own)
            sandbox.clean()


def test_any_value_of_any_key_of_a_config_file_is_used_or_explained(sandbox: Sandbox):
    file = sandbox.folder / "mine/own.yaml"
    for f in fields(TrainConfig):
        for value in YAML_VALUES:
            file.write_text(yaml.safe_dump({f.name: value}))
            sandbox.run("train.py", "--config", "mine/own.yaml", "--data", "mini", "--dry-run")
