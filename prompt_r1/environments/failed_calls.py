"""The share of failed calls. If it is too high, the run ends."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from prompt_r1.errors import EnvError, Resumable

# The share is taken over the last 200 calls. Fewer than 100 calls count as 100, so that a few early failures
# do not end the run.
WINDOW, MIN_CALLS = 200, 100
MAX_SHARE = 0.20


class FailedCalls:
    """How the last calls that were sent to an environment ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed: deque[bool] = deque(maxlen=WINDOW)  # For each of the last calls: whether it failed.

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the call that is sent inside `with`. If too many have failed, Resumable is raised."""
        try:
            yield
        except EnvError as error:
            self._failed.append(True)
            failed, calls = sum(self._failed), len(self._failed)
            if failed / max(calls, MIN_CALLS) > MAX_SHARE:
                raise Resumable(
                    f"{failed} of the last {calls} calls of {self._name} failed, this one: {error}"
                ) from error
            raise
        self._failed.append(False)
