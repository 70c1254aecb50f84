"""Requests and tokens per minute, as providers limit them. Pure: the caller passes the time."""


class RateLimit:
    """Gives each request its start time, in the order of the calls of `start_time`. 0 means no limit.

    Starts are spread evenly instead of in bursts: each request takes up 60 / limit seconds of the minute, and
    each of its tokens likewise. The number of tokens is an estimate, corrected after the response.
    """

    def __init__(self, *, requests_per_minute: float = 0.0, tokens_per_minute: float = 0.0) -> None:
        self._seconds_per_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._seconds_per_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._next_by_requests = 0.0  # when the limit of requests allows the next one
        self._next_by_tokens = 0.0

    def start_time(self, now: float, tokens: int) -> float:
        """Reserve the start of a request of about `tokens` tokens, and return its time."""
        start = max(now, self._next_by_requests, self._next_by_tokens)
        self._next_by_requests = start + self._seconds_per_request
        self._next_by_tokens = start + tokens * self._seconds_per_token
        return start

    def correct(self, estimated: int, actual: int) -> None:
        """Account for a request that was estimated at `estimated` tokens and took `actual`."""
        self._next_by_tokens += (actual - estimated) * self._seconds_per_token
