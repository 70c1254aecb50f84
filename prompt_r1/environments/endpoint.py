"""What a user gives to reach an endpoint: its URL and a key. Checked before anything is sent."""

import ipaddress
import re

import httpx

from prompt_r1.types import UsageError


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


def scrub(text: str, key: str) -> str:
    """The text without the key, in any case."""
    return re.sub(re.escape(key), "[key]", text, flags=re.IGNORECASE) if key else text
