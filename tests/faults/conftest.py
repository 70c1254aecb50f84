"""Fixtures of the fault tests: the harness, and a short run with few questions."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_harness import FaultHarness


@pytest.fixture(scope="session")
def harness() -> Iterator[FaultHarness]:
    harness = FaultHarness()
    try:
        yield harness
    finally:
        harness.close()


@pytest.fixture(scope="session")
def arguments(asking_agent, tmp_path_factory) -> list[str]:
    """The arguments of a run of a few seconds, with calls, mini-batches, validations and checkpoints."""
    file: Path = tmp_path_factory.mktemp("questions") / "own.jsonl"
    rows = [{"question": f"Who is number {number}?", "answer": "Anna"} for number in range(6)]
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = """
        --config mini --env mini --out run --steps 5 --questions 4 --group-size 2 --mini-batch 4 --lr 0.001
        --max-turns 2 --max-new 60 --max-tokens 900 --val-limit 2 --save-every 1
        --device cpu
    """
    data = ["--data", str(file), "--val-data", str(file), "--test-data", str(file)]
    return ["--agent", str(asking_agent), *data, *settings.split()]


@pytest.fixture
def unresponsive_endpoint() -> Iterator[str]:
    """An endpoint that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        yield f"mini@http://127.0.0.1:{server.getsockname()[1]}/v1"
