"""The time limit of a request.

All games of a step wait for the slowest call, so a request that takes much longer than usual is given up, and
sent again. But a server may be slow because of load, which more requests increase. So the limit doubles with
each request of a call that got no reply.
"""

import asyncio
from collections import deque
from statistics import median

from prompt_r1.environments.sources import Busy, Caller, Reply, Source
from prompt_r1.types import Message

# Much longer than usual is four times the median time of the last 200 replies, and at least 10 seconds. With
# fewer than 50 replies, nothing is known about the usual time.
SLOW_FACTOR, MIN_SLOW_SECONDS = 4.0, 10.0
WINDOW, MIN_REPLIES = 200, 50


class TimeLimit:
    """The time limit of a source's requests."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reply_seconds: deque[float] = deque(maxlen=WINDOW)

    async def attempt(self, messages: list[Message], caller: Caller, *, failures: int) -> Reply:
        """Let the source make one attempt, after `failures` requests of the call that got no reply.

        Raises Busy if it takes too long, and what the attempt raises.
        """
        limit = self._seconds(failures)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(limit) as timer:
                reply = await self._source.attempt(messages, caller)
        except TimeoutError:
            if not timer.expired():  # The source has raised it itself.
                raise
            raise Busy(f"no complete response within {limit:g} s", may_be_billed=True) from None
        self._reply_seconds.append(loop.time() - begin)
        return reply

    def _seconds(self, failures: int) -> float | None:
        """The limit in seconds; None: no limit."""
        longest = self._source.timeout
        if longest is None or not self._source.resends_slow or len(self._reply_seconds) < MIN_REPLIES:
            return longest
        limit = max(MIN_SLOW_SECONDS, SLOW_FACTOR * median(self._reply_seconds))
        return min(limit * 2.0 ** min(failures, 10), longest)
