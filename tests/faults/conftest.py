"""What the fault tests run: a tiny agent that asks, and very few questions."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.lives import Nursery, nursery


@pytest.fixture(scope="session")
def nurse() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


@pytest.fixture(scope="session")
def line(asking_agent, tmp_path_factory) -> list[str]:
    """The arguments of a run of a few seconds: games with calls, mini-batches, validations, checkpoints."""
    file: Path = tmp_path_factory.mktemp("questions") / "own.jsonl"
    rows = [{"question": f"Who is number {number}?", "answer": "Anna"} for number in range(6)]
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "agent": asking_agent, "env": "mini", "data": file, "val-data": file, "test-data": file, "out": "run",
        "steps": 5, "questions": 4, "group-size": 2, "mini-batch": 4, "max-turns": 3, "max-new": 60,
        "max-tokens": 900, "lr": 1e-3, "val-every": 2, "val-limit": 2, "save-every": 1,
        "device": "cpu", "kv-tokens": 20000,
    }  # fmt: skip
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]
