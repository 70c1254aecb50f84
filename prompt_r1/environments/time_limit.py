"""The time limit of a request.

All games of a step wait for the slowest call, so a request that takes much longer than usual is given up, and
sent again. But a server may be slow because of load, which more requests increase. So the limit doubles with
each request of a call that got no reply.
"""

from collections import deque
from statistics import median

from prompt_r1.environments.sources import Source

# Much longer than usual is four times the median time of the last 200 replies, and at least 10 seconds. With
# fewer than 50 replies, nothing is known about the usual time.
SLOW_FACTOR, MIN_SLOW_SECONDS = 4.0, 10.0
WINDOW, MIN_REPLIES = 200, 50


class TimeLimit:
    """The time limit of a source's requests."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reply_seconds: deque[float] = deque(maxlen=WINDOW)

    def note_reply(self, seconds: float) -> None:
        """Note that a request got its reply after so many seconds."""
        self._reply_seconds.append(seconds)

    def seconds(self, failures: int) -> float | None:
        """The limit of a request after `failures` requests of its call that got no reply; None: no limit."""
        longest = self._source.timeout
        if longest is None or not self._source.resends_slow or len(self._reply_seconds) < MIN_REPLIES:
            return longest
        limit = max(MIN_SLOW_SECONDS, SLOW_FACTOR * median(self._reply_seconds))
        return min(limit * 2.0 ** min(failures, 10), longest)
