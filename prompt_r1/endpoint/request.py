"""Check URL and key; decode and scrub responses."""

import ipaddress
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import httpx

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.errors import UsageError
from prompt_r1.terminal import SHORTEST_SECRET, printable, scrub

LONGEST_REASON = 300  # characters of a provider's error message
GZIP_OR_ZLIB = 47  # of zlib: found by the header
LONGEST_TEXT = 500_000  # characters of a reply: about 128,000 tokens, more than most models can write


@dataclass(frozen=True)
class Response:
    """A complete HTTP response. The names in `headers` are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class BadBody(Exception):
    """A response whose body is too large, or cannot be decoded: one clause that says so."""


def decoded(body: bytes | bytearray, encoding: str, limit: int) -> bytes:
    """The plain body of a response, of at most `limit` bytes. Raises BadBody.

    A compressed body can be a thousand times as large as what was received, so it is not decoded further.
    """
    plain = bytes(body)
    if encoding in ("gzip", "deflate"):
        try:
            plain = zlib.decompressobj(wbits=GZIP_OR_ZLIB).decompress(plain, limit + 1)
        except zlib.error as error:
            raise BadBody(f"a body that is not {encoding}: {error}") from None
    elif encoding not in ("", "identity"):
        raise BadBody(f"a body encoded as {encoding[:40]!r}")
    if len(plain) > limit:
        raise BadBody(f"a response of over {limit:,} bytes")
    return plain


@dataclass(frozen=True)
class ApiKey:
    """The key of an endpoint. The note of one that was not sent says why."""

    text: str = ""
    note: str = ""  # the end of fatal errors


def checked_key(key: ApiKey) -> ApiKey:
    """Return the key without surrounding blanks. Raises UsageError where it cannot be an HTTP header.

    httpx would raise too, with the key in its exception.
    """
    text = key.text.strip()
    if text and not re.fullmatch(r"[\x21-\x7e]+", text):
        raise UsageError(
            "OPENAI_API_KEY contains a line break, a blank or a non-ASCII character: copy it again"
        )
    return replace(key, text=text)


def checked_base_url(base_url: str) -> str:
    """Return the URL that precedes /chat/completions, without a final slash. Raises UsageError."""
    try:
        url = httpx.URL(base_url.strip())
    except httpx.InvalidURL:
        raise UsageError("the base URL of an endpoint is not a URL: give http://host:port/v1") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise UsageError(
            "the base URL of an endpoint must look like http://host:port/v1 "
            "(without user, password or query; a key goes to OPENAI_API_KEY)"
        )
    return str(url).rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Return whether the endpoint is on this machine."""
    host = httpx.URL(base_url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def scrubbed(outcome: Outcome, key: ApiKey) -> Outcome:
    """Remove the key from the texts of an outcome, and cut them. A fatal one says why no key was sent.

    Servers echo headers in errors, and some in replies. A reply of megabytes would be copied many times.
    """
    # Scrub before cutting: half a key would not be found.
    reason = printable(" ".join(scrub(outcome.reason, key.text)[:LONGEST_TEXT].split()))[:LONGEST_REASON]
    secret = key.text if len(key.text) >= SHORTEST_SECRET else ""
    return replace(
        outcome,
        text=scrub(outcome.text, secret)[:LONGEST_TEXT],
        reason=f"{reason}; {key.note}" if outcome.verdict == "fatal" and key.note else reason,
        reasoning=scrub(outcome.reasoning, secret)[:LONGEST_TEXT],
        finish=scrub(outcome.finish, secret)[:LONGEST_REASON],
        written=len(outcome.text) + len(outcome.reasoning),
    )
