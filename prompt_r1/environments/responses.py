"""Read an endpoint's responses; the wait before a retry. Pure. The rules are a table in docs/running.md.

Structure decides before words: a status, wherever the body has it, then names of codes and fields, and only
then a message. What no rule knows is an error of this dialogue, of which the caller counts the share.
"""

import json
import math
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

from prompt_r1.environments.sources import Outcome

LONGEST_WAIT, LONGEST_BELIEVED = 120.0, 86400.0  # seconds; longer requested waits are cut, or ignored
LARGEST_COUNT = 10_000_000  # tokens of a prompt or a reply; more than any model's context
MOST_BYTES = 2_000_000  # of a response, also when it is decompressed: more than most models can write
LONGEST_SAID = 10_000  # characters of an error that are read
FIRST_BACK_OFF, LONGEST_BACK_OFF = 0.5, 30.0  # seconds

RETRIED_STATUSES = (408, 409, 425, 429)
NEVER_RETRIED = (501, 505, 511)  # no such method, no such protocol, log in to the network first
CODE_FIELDS = ("code", "type", "status", "status_code", "reason", "__type")  # anywhere in an error
TEMPORARY = re.compile("(?i)throttl|rate.?limit|overload|unavailable(?!_)|server.?error|too.?many.?req|busy")
MESSAGE_FIELD = re.compile("(error|status)?_?(message|msg)|detail|errors?", re.IGNORECASE)  # errorMessage
FILTERED = ("content_filter", "content_policy_violation")
# In codes as in messages: context_length_exceeded, "maximum prompt length is 9", "input is too long", …
TOO_LONG = re.compile(
    r"(context|tokens?).?(length|window|size|limit)|too.?(long|large|many tokens)"
    r"|max.{0,9}((prompt|model|input).?)?length|must have less than"
    r"|(prompt|input).{0,30}(length|tokens?.{0,30}(exceed|limit|must|max))",
    re.IGNORECASE,
)
# A field that is rejected as such, whatever its value: only then the request is sent without it.
REJECTED = re.compile(
    r"un(known|supported|recogni[sz]ed|expected)|(not|n't)( be)? (support|allow|permit|accept|recogni)"
    r"|forbidden|deprecated|cannot (both )?be (used|set|specified)",
    re.IGNORECASE,
)
# How a word of a `finish_reason` begins where the model has ended or is full, and what those of a failure
# contain. Any other is the name of a filter, of which each provider has its own.
NORMAL_END = re.compile(
    r"^$|(?<![a-z])(stop|eos|end|complete|done|success|normal|nul|none|tool|function|"
    r"(?P<full>\w*limit|max|length|context|trunc|incompl))",
    re.IGNORECASE,
)
FAILED_END = re.compile("error|abort|fail|cancel|interrupt|time.?out|resource|unavailable", re.IGNORECASE)
ADVICE = {
    401: " (check OPENAI_API_KEY; a URL from an agent's folder gets it only if --env names it too)",
    402: " (the account has no credit)",
    403: " (check that OPENAI_API_KEY may use this model)",
    404: " (check the model's name and the base URL)",
}
PAGE_ADVICE = " (a web page, not the API's answer: check the base URL and the proxy)"
WAIT_FIELD = re.compile("retry[-_]?(after|delay|in)", re.IGNORECASE)


@dataclass(frozen=True)
class Attempt:
    """What one request came to."""

    outcome: Outcome
    lost: bool = False  # there is no reply, and the provider may bill it all the same
    wait: float | None = None  # seconds in which the provider asks for no calls
    blamed: str = ""  # where the provider names a field that it rejects: some models take no temperature
    misdirected: bool = False  # no chat server, or a wrong setting of it, unless it has replied before


def failed(reason: str, *, lost: bool = False, misdirected: bool = False) -> Attempt:
    """A request without a reply that may be repeated."""
    return Attempt(Outcome("failed", reason=reason), lost=lost, misdirected=misdirected)


def classify(status: int, headers: Mapping[str, str], body: bytes, *, now: float) -> Attempt:
    """Classify a complete response.

    The names in `headers` are lower-case; `now` is in epoch seconds.
    """
    raw = _decompressed(body)
    if len(raw) > MOST_BYTES:
        return failed(f"a response of over {MOST_BYTES:,} bytes", lost=True, misdirected=True)
    text = _decoded(raw, headers.get("content-type", ""))
    data, is_unknown = _parse(text), False
    choice = _first(data.get("choices"))
    sent = data.get("error") or choice.get("error")
    objects = list(_objects(sent if isinstance(sent, dict) else data))
    message, field = _error_of(objects)
    named = [fields.get(name) for fields in objects for name in CODE_FIELDS]
    codes = [str(code) for code in named if code and isinstance(code, str | int)]
    if 200 <= status < 300:
        is_error = bool(sent) and bool(message or codes)
        if choice and not is_error:
            return _classify_completion(data, choice)
        statuses = [int(code) for code in codes if re.fullmatch("[45]\\d\\d", code)]
        if not is_error and not (statuses and message):
            return failed(_described(text, headers, message), lost=True, misdirected=True)
        is_unknown = not statuses and not TEMPORARY.search(" ".join((*codes, message)))
        reason, status = f"HTTP {status}", statuses[0] if statuses else 500
    else:
        reason = f"HTTP {status}" + (f" to {headers['sent-location']}" if "sent-location" in headers else "")
    reason += f": {message}" if message else ""
    if "insufficient_quota" in (*codes, *message.split()):
        return Attempt(Outcome("refused", reason=f"{reason} (check plan and billing)"))
    words = " ".join(codes)
    is_busy = status in RETRIED_STATUSES or status > 500
    is_busy |= status in (400, 403) and bool(TEMPORARY.search(words))
    if not is_busy:
        if set(FILTERED) & set(codes):
            return Attempt(Outcome("outcome", label="content_filter", reason=reason))
        is_long = status in (400, 422, 500) and TOO_LONG.search(f"{words} {message}")
        if is_long or status == 413:
            return Attempt(Outcome("outcome", label="context_length", reason=reason))
    if (is_busy or status == 500) and status not in NEVER_RETRIED:
        reason += ADVICE[404] if is_unknown else ""
        return replace(failed(reason, misdirected=is_unknown), wait=requested_wait(headers, data, now=now))
    # Some errors name the field only in the message: "Unsupported value: 'temperature' does not support 0".
    is_rejected = status in (400, 422) and REJECTED.search(f"{message} {words}")
    blamed = (field or message) if is_rejected else ""
    said = "" if message else " (check the base URL and any proxy)"
    reason += PAGE_ADVICE if text.lstrip().startswith("<") else ADVICE.get(status, said)
    return Attempt(Outcome("refused", reason=reason), blamed=blamed)


def requested_wait(headers: Mapping[str, str], data: object = None, *, now: float) -> float | None:
    """Seconds for which a response asks for no calls, at most LONGEST_WAIT; None for none that is believed.

    They stand in a field such as retry-after-ms or retryDelay of headers or body; the shortest one counts.
    """
    waits = [
        _seconds(value, 0.001 if name.lower().endswith("ms") else 1.0, now)
        for fields in (headers, *_objects(data))
        for name, value in fields.items()
        if WAIT_FIELD.search(name)
    ]
    return min((min(wait, LONGEST_WAIT) for wait in waits if 0 < wait <= LONGEST_BELIEVED), default=None)


def back_off(failures: int, rng: random.Random) -> float:
    """Seconds to wait after this many failures: exponential back-off with full jitter."""
    longest = min(LONGEST_BACK_OFF, FIRST_BACK_OFF * 2.0 ** min(failures - 1, 10))
    return rng.uniform(0, longest)


def _described(text: str, headers: Mapping[str, str], message: str) -> str:
    """What a successful response is that is no chat completion, and what it says."""
    if re.search("^data:", text, re.MULTILINE):
        return "a stream, which was not asked for: set the server to send whole responses"
    if encoding := headers.get("sent-content-encoding"):
        return f"no chat completion in a body encoded as {encoding[:40]!r}"
    what = "a web page" if text.lstrip().startswith("<") else "no chat completion"
    said = f"; it says: {message}" if message else ""
    return f"the response is {what}: check the base URL, which often ends in /v1{said}"


def _classify_completion(data: Mapping[str, object], choice: Mapping[str, object]) -> Attempt:
    finish = _text_of(choice.get("finish_reason"))
    sent = choice.get("message") or choice.get("delta") or choice.get("text")
    message = sent if isinstance(sent, dict) else {"content": sent}
    text = _text_of(message.get("content"))
    refusal = _text_of(message.get("refusal")) or _text_of(message.get("content"), "refusal")
    reasoning = _text_of(message.get("reasoning_content")) or _text_of(message.get("reasoning"))
    reply = Outcome("ok", text or refusal, "", "", finish, reasoning, *_counts(data.get("usage")))
    end = NORMAL_END.search(finish)
    if FAILED_END.search(finish):
        return failed(f"the reply was cut off by an error (finish_reason {finish})", lost=True)
    if end is None:
        return Attempt(replace(reply, verdict="outcome", label="content_filter"))
    if text.strip():
        return Attempt(reply)
    if refusal.strip():
        return Attempt(replace(reply, verdict="outcome", label="refusal"))
    if end["full"]:
        return Attempt(replace(reply, verdict="outcome", label="length"))
    hint = "; all text is in reasoning_content: turn the server's reasoning parser off" if reasoning else ""
    return failed(f"an empty reply (finish_reason {finish}){hint}", lost=True, misdirected=True)


def _error_of(objects: list[Mapping[str, object]]) -> tuple[str, str]:
    """The message of an error in any provider's form, and the request field that it names."""
    said = [value for fields in objects for name, value in fields.items() if MESSAGE_FIELD.fullmatch(name)]
    texts = [text for value in said for text in (value if isinstance(value, list) else [value])]
    message = next((text for text in texts if text and isinstance(text, str)), "")
    field = next(filter(None, (fields.get("param") or fields.get("loc") for fields in objects)), "")
    if isinstance(field, list):  # FastAPI's
        field = ".".join(map(str, field))
        message = f"{field}: {message}"
    return clean(message)[:LONGEST_SAID], str(field)


def _objects(value: object) -> Iterator[Mapping[str, object]]:
    """All objects in a JSON value, the outer ones first, because inner ones may echo the request."""
    values = [value]
    for value in values:  # which grows
        if isinstance(value, dict):
            yield value
            values += value.values()
        elif isinstance(value, list):
            values += value


def _decompressed(body: bytes) -> bytes:
    """The body without gzip or deflate, as it begins, whatever its header says; cut off above MOST_BYTES."""
    if body.startswith((b"\x1f\x8b", b"x")):
        with suppress(zlib.error):
            return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, MOST_BYTES + 1)
    return body


def _decoded(raw: bytes, content_type: str) -> str:
    """A body as text: JSON is UTF-8, whatever its header says, unless it cannot be."""
    for encoding in (json.detect_encoding(raw), content_type.rpartition("charset=")[2].strip('" ')):
        with suppress(UnicodeError, LookupError):
            return raw.decode(encoding)
    return raw.decode(errors="replace")


def _parse(text: str) -> dict[str, object]:
    """The JSON object of a response, which Google puts into a list; of other text, what it says."""
    with suppress(ValueError, RecursionError):
        if data := _first(json.loads(text, strict=False)):
            return data
    said = re.sub("<[^<>]*>", " ", text[:LONGEST_SAID])  # of a web page
    return {"message": "" if "\ufffd" in said else said.strip()}


def _first(choices: object) -> dict[str, object]:
    first = choices[0] if isinstance(choices, list) and choices else choices
    return first if isinstance(first, dict) else {}


def _text_of(content: object, kind: str = "text") -> str:
    """The text of a message's content: a string, or a list of parts, of which those of this kind count."""
    texts, parts = [], content if isinstance(content, list) else [content]
    for sent in parts:
        part = sent if isinstance(sent, dict) else {"text": sent}
        if str(part.get("type", kind)).endswith(kind) and not part.get("thought"):
            value = part.get(kind)
            texts.append(value.get("value") if isinstance(value, dict) else value)
    return clean("".join(text for text in texts if isinstance(text, str)))


def clean(text: str) -> str:
    """Make a text encodable: replace lone surrogates by "?" and remove NUL characters."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "")


def _counts(usage: object) -> tuple[int, int]:
    """The tokens in and out. Where only the total contains those of the thinking, they count as well."""
    sent = _first(usage)
    tokens_in = _count(sent.get("prompt_tokens")) or _count(sent.get("input_tokens"))
    tokens_out = _count(sent.get("completion_tokens")) or _count(sent.get("output_tokens"))
    return tokens_in, max(tokens_out, _count(sent.get("total_tokens")) - tokens_in if tokens_in else 0)


def _count(value: object) -> int:
    """A number of tokens, also one that is sent as 7.0 or "7"; 0 for one that cannot be right."""
    match = re.fullmatch(r"(\d{1,8})(\.0)?", str(value))
    return int(match[1]) if match and int(match[1]) <= LARGEST_COUNT else 0


def _seconds(value: object, unit: float, now: float) -> float:
    """Seconds of a number, of one in seconds (19.5s), or until a date of HTTP; `unit` is that of a number."""
    text = str(value).strip()
    with suppress(ValueError):
        return float(text.removesuffix("s")) * unit
    with suppress(ValueError, TypeError, OverflowError, IndexError):
        return parsedate_to_datetime(text).timestamp() - now
    return math.nan
