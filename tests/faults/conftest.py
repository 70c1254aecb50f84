"""The run of the fault tests: a tiny agent that asks, and six questions."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import Launcher, open_launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    with open_launcher() as launcher:
        yield launcher


@pytest.fixture(scope="session")
def arguments(asking_agent, tmp_path_factory) -> list[str]:
    """The arguments of a run of a few seconds: games with calls, mini-batches, validations, checkpoints."""
    file: Path = tmp_path_factory.mktemp("questions") / "own.jsonl"
    rows = [{"question": f"Who is number {number}?", "answer": "Anna"} for number in range(6)]
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "agent": asking_agent,
        "env": "mini",
        "data": file,
        "val-data": file,
        "test-data": file,
        "out": "run",
        "steps": 5,
        "questions": 4,
        "group-size": 2,
        "mini-batch": 4,
        "max-turns": 3,
        "max-new": 60,
        "max-tokens": 900,
        "lr": 1e-3,
        "val-every": 2,
        "val-limit": 2,
        "save-every": 1,
        "device": "cpu",
        "kv-tokens": 20000,
    }
    return [f"--{name}={value}" for name, value in settings.items()]
