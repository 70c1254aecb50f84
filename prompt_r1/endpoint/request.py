"""What goes to an endpoint and comes back; its URL and key, checked before anything is sent."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import httpx

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.errors import UsageError
from prompt_r1.terminal import printable

LONGEST_REASON = 300  # characters of a provider's message
SHORTEST_SECRET = 12  # a shorter key ("EMPTY", "ollama") is a placeholder: replies may say the word


@dataclass(frozen=True)
class Response:
    """An HTTP response, whole; the names in `headers` are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Request:
    """What is posted where, besides model and fields; `tokens` that it and its reply may take."""

    path: str
    content: Mapping[str, object]
    tokens: int


def checked_key(key: str) -> str:
    """The key without blanks around it. httpx would show an illegal header value in its exception."""
    key = key.strip()
    if key and not re.fullmatch(r"[\x21-\x7e]+", key):
        raise UsageError("OPENAI_API_KEY holds a line break, a blank or a non-ASCII character: copy it again")
    return key


def checked_base_url(base_url: str) -> str:
    """The URL up to and without /chat/completions."""
    try:
        url = httpx.URL(base_url.strip())
    except httpx.InvalidURL:
        raise UsageError("the environment's base URL is not a URL: give http://host:port/v1") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise UsageError("the environment's base URL must look like http://host:port/v1 "
                         "(without user, password or query; a key goes to OPENAI_API_KEY)")  # fmt: skip
    return str(url).rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Is the endpoint on this machine?"""
    host = httpx.URL(base_url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def without_key(outcome: Outcome, key: str) -> Outcome:
    """Servers echo headers, in errors and (proxies for debugging) in replies."""
    # Cut after scrubbing: half a key would not be found.
    reason = printable(" ".join(scrub(outcome.reason, key).split()))[:LONGEST_REASON]
    if len(key) < SHORTEST_SECRET:
        return replace(outcome, reason=reason)
    text, reasoning = scrub(outcome.text, key), scrub(outcome.reasoning, key)
    return replace(outcome, text=text, reason=reason, reasoning=reasoning)


def scrub(text: str, key: str) -> str:
    """The text without the key, in any case."""
    return re.sub(re.escape(key), "[key]", text, flags=re.IGNORECASE) if key else text
