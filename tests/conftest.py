"""Settings of the whole suite."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub; transformers reads it when it is imported

import hypothesis  # noqa: F401  (else its plugin imports it at the very end, where CPython 3.11 trips)
import pytest
import torch

from tests import tiny

# Tiny models are faster on one thread, and tests that run side by side do not fight for cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def asking_agent(tmp_path_factory) -> Path:
    """The folder of a tiny agent that asks its environment and answers."""
    return tiny.save_asking_agent(tmp_path_factory.mktemp("asking"))
