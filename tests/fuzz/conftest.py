"""The fixture of the fuzz tests."""

from collections.abc import Iterator

import pytest

from tests.support.sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path, asking_agent) -> Iterator[Sandbox]:
    """A user's folder. The test fails if a program broke a promise in it."""
    sandbox = Sandbox(tmp_path, asking_agent)
    yield sandbox
    assert not sandbox.broken, "\n\n".join(map(str, sandbox.broken[:10])) + f"\n{len(sandbox.broken)} in all"
