"""Requests and tokens per minute, as providers limit them. Pure: the clock is the caller's."""


class Pace:
    """Gives each request its time to start, in the order of the calls of `start`. 0: no limit.

    Starts are spread evenly, not in bursts: each request occupies 60 / limit seconds of the minute, and each
    token its own share. What a request really took is told afterwards.
    """

    def __init__(self, *, requests_per_minute: float = 0.0, tokens_per_minute: float = 0.0) -> None:
        self._request = 60 / requests_per_minute if requests_per_minute else 0.0  # seconds
        self._token = 60 / tokens_per_minute if tokens_per_minute else 0.0  # seconds
        self._requests_free = 0.0  # when the next request may start
        self._tokens_free = 0.0

    def start(self, now: float, tokens: int) -> float:
        """When a request of about `tokens` may start."""
        start = max(now, self._requests_free, self._tokens_free)
        self._requests_free = start + self._request
        self._tokens_free = start + tokens * self._token
        return start

    def correct(self, estimated: int, actual: int) -> None:
        """A request that was thought to take `estimated` tokens took `actual`."""
        self._tokens_free += (actual - estimated) * self._token
