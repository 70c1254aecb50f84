"""The share of failed calls. Many failed calls are warned of, and too many end the run."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from prompt_r1.errors import EnvError, Resumable

logger = logging.getLogger(__name__)

# The share is taken over the last 200 calls. Fewer than 100 calls count as 100, so that one early failure
# raises no alarm.
WINDOW, MIN_CALLS = 200, 100
WARN_ABOVE, STOP_ABOVE = 0.05, 0.20


class FailedCalls:
    """How the last calls that were sent to an environment ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed: deque[bool] = deque(maxlen=WINDOW)  # For each of the last calls: whether it failed.
        self._warned = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the call that is sent inside `with`.

        If it fails, a high share of failed calls is warned of once, and Resumable is raised if the share is
        too high.
        """
        try:
            yield
        except EnvError as error:
            self._failed.append(True)
            share = self._share()
            shown = f"{sum(self._failed)} of the last {len(self._failed)} calls of {self._name} failed"
            shown += f", this one: {error}"
            if share > STOP_ABOVE:
                raise Resumable(shown) from error
            if share > WARN_ABOVE and not self._warned:
                logger.warning("%s", shown)
                self._warned = True
            raise
        self._failed.append(False)
        if self._share() <= WARN_ABOVE:
            self._warned = False

    def _share(self) -> float:
        return sum(self._failed) / max(len(self._failed), MIN_CALLS)
