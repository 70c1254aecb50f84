"""Settings and fixtures of all tests."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported

import hypothesis
import pytest
import torch

from tests.support import tiny
from tests.support.programs import CallHere, caller_in_this_process

# Tiny models are faster on one thread, and the test processes do not compete for cores.
torch.set_num_threads(1)

# The time of an example depends on the load of the machine: no deadline.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def asking_agent(tmp_path_factory) -> Path:
    """The folder of a tiny agent that prompts its environment and answers."""
    return tiny.save_asking_agent(tmp_path_factory.mktemp("asking_agent"))


@pytest.fixture
def call_here(monkeypatch, capfd) -> CallHere:
    """Runs an entry point as from a shell, but in this process."""
    return caller_in_this_process(monkeypatch, capfd)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the marked tests a longer timeout."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("learning", "slow", "faults")):
            item.add_marker(pytest.mark.timeout(900))
