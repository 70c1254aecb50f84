"""The fixture of the fuzz tests."""

import pytest

from tests.support.providers import KEY
from tests.support.sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path, asking_agent, call_here, monkeypatch) -> Sandbox:
    """A user's folder. The test fails when a program breaks a promise in it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return Sandbox(tmp_path, asking_agent, call_here)
