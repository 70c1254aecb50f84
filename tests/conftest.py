"""Settings of the whole suite."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub; transformers reads it when it is imported

import hypothesis
import pytest
import torch

from tests import tiny
from tests.programs import CallHere, caller_in_this_process

# Tiny models are faster on one thread, and tests that run side by side do not fight for cores.
torch.set_num_threads(1)

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def asking_agent(tmp_path_factory) -> Path:
    """The folder of a tiny agent that asks its environment and answers."""
    return tiny.save_asking_agent(tmp_path_factory.mktemp("asking"))


@pytest.fixture
def call_here(monkeypatch, capfd) -> CallHere:
    """Run an entry point as from a shell, but in this process."""
    return caller_in_this_process(monkeypatch, capfd)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the marked tests more time: they train, are killed and resumed, or wait on purpose."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("learning", "slow", "faults")):
            item.add_marker(pytest.mark.timeout(900))
