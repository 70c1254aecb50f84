"""Fixtures of the fuzz tests; the matrix of kinds × outcomes is printed at the end of the session."""

from collections.abc import Iterator

import pytest

from tests.fuzz.sandbox import Matrix, Sandbox

MATRIX = pytest.StashKey[Matrix]()


@pytest.fixture
def sandbox(tmp_path, asking_agent, request) -> Iterator[Sandbox]:
    """A user's folder. The test fails if a program broke a promise in it."""
    matrix = request.config.stash.setdefault(MATRIX, Matrix())
    sandbox = Sandbox(tmp_path, asking_agent, matrix)
    yield sandbox
    assert not sandbox.broken, "\n\n".join(map(str, sandbox.broken[:10])) + f"\n{len(sandbox.broken)} in all"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix; with several processes (`-n`) it stays in them."""
    if MATRIX in config.stash:
        terminalreporter.write_line(f"\nFuzz cases by kind and outcome (exit codes):\n{config.stash[MATRIX]}")
