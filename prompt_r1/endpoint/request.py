"""Requests to an endpoint and responses from it; checks of its URL and key before anything is sent."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import httpx

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.errors import UsageError
from prompt_r1.terminal import SHORTEST_SECRET, printable, scrub

USUAL_REPLY_TOKENS = 200  # estimate for the limit of tokens per minute, corrected after the response
LONGEST_REASON = 300  # characters of a provider's error message
LONGEST_TEXT = 500_000  # characters of a reply: about 128,000 tokens, more than most models can write


@dataclass(frozen=True)
class Response:
    """A complete HTTP response. The names in `headers` are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Request:
    """A POST to `path`. The client adds the model and its fields to `content`."""

    path: str
    content: Mapping[str, object]
    tokens: int  # estimate of prompt and reply together


def checked_key(key: str, variable: str) -> str:
    """Return the key without surrounding blanks. Raises UsageError where it cannot be an HTTP header.

    httpx would raise too, with the key in its exception. `variable` is the environment variable of the key.
    """
    key = key.strip()
    if key and not re.fullmatch(r"[\x21-\x7e]+", key):
        raise UsageError(f"{variable} contains a line break, a blank or a non-ASCII character: copy it again")
    return key


def checked_base_url(base_url: str) -> str:
    """Return the URL that precedes /chat/completions, without a final slash. Raises UsageError."""
    try:
        url = httpx.URL(base_url.strip())
    except httpx.InvalidURL:
        raise UsageError("the base URL of an endpoint is not a URL: give http://host:port/v1") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise UsageError(
            "the base URL of an endpoint must look like http://host:port/v1 "
            "(without user, password or query; a key goes to OPENAI_API_KEY, or AGENT_API_KEY of an agent)"
        )
    return str(url).rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Return whether the endpoint is on this machine."""
    host = httpx.URL(base_url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def scrub_outcome(outcome: Outcome, key: str) -> Outcome:
    """Remove the key from the texts of an outcome, and cut them.

    Servers echo headers in errors, and some in replies. A reply of megabytes would be copied many times.
    """
    # Scrub before cutting: half a key would not be found.
    reason = scrub(outcome.reason, key)[:LONGEST_TEXT]
    secret = key if len(key) >= SHORTEST_SECRET else ""
    return replace(
        outcome,
        text=scrub(outcome.text, secret)[:LONGEST_TEXT],
        reason=printable(" ".join(reason.split()))[:LONGEST_REASON],
        reasoning=scrub(outcome.reasoning, secret)[:LONGEST_TEXT],
        finish=scrub(outcome.finish, secret)[:LONGEST_REASON],
        written=len(outcome.text) + len(outcome.reasoning),
    )
