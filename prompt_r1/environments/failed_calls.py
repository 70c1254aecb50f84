"""The share of failed calls. Many failed calls are warned of, and too many end the run."""

import logging
from collections import deque

from prompt_r1.errors import EnvError, Resumable

logger = logging.getLogger(__name__)

# The share is taken over the last 200 calls. Fewer than 100 calls count as 100, so that one early failure
# raises no alarm.
WINDOW, MIN_CALLS = 200, 100
WARN_ABOVE, STOP_ABOVE = 0.05, 0.20


class FailedCalls:
    """How the last calls of an environment ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed: deque[bool] = deque(maxlen=WINDOW)  # For each of the last calls: whether it failed.
        self._warned = False

    def add_success(self) -> None:
        """Add a call that got a reply."""
        self._failed.append(False)
        if self._share() <= WARN_ABOVE:
            self._warned = False

    def add_failure(self, error: EnvError) -> None:
        """Add a call that failed. Warns once if the share becomes high, and raises Resumable if too high."""
        self._failed.append(True)
        share = self._share()
        shown = f"{sum(self._failed)} of the last {len(self._failed)} calls of {self._name} failed"
        shown += f", this one: {error}"
        if share > STOP_ABOVE:
            raise Resumable(shown)
        if share > WARN_ABOVE and not self._warned:
            logger.warning("%s", shown)
            self._warned = True

    def _share(self) -> float:
        return sum(self._failed) / max(len(self._failed), MIN_CALLS)
