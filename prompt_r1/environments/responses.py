"""Classify an endpoint's responses; the wait before a retry. Pure. Providers fail in many ways."""

import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

from prompt_r1.environments.sources import Outcome

LONGEST_HONOURED_WAIT = 120.0  # seconds; longer requested waits are ignored
LARGEST_COUNT = 10_000_000  # tokens of a prompt or a reply; more than any model's context
FIRST_BACK_OFF, LONGEST_BACK_OFF = 0.5, 30.0  # seconds

RETRIED_STATUSES = (408, 409, 425, 429)
TOO_LONG = re.compile(
    r"context.?(length|window|size)|(prompt|input|model) length|(prompt|input|request) is too long"
    r"|maximum number of tokens|too many (input |prompt )?tokens|.inputs. (tokens \+|must have less than)",
    re.IGNORECASE,
)
# A field that is rejected as such, whatever its value: only then the request is sent without it.
REJECTED = re.compile(
    r"un(known|supported|recogni[sz]ed|expected)|(not|n't)( be)? (support|allow|permit|accept|recogni)"
    r"|forbidden|deprecated|cannot (both )?be (used|set|specified)",
    re.IGNORECASE,
)
# How a `finish_reason` begins where the model has ended or is full, and what those of a failure contain. Any
# other is the name of a filter, of which each provider has its own.
NORMAL_END = re.compile("stop|eos|end|complete|done|tool|function|(max|length|model)|$", re.IGNORECASE)
FAILED_END = re.compile("error|abort|fail|cancel|interrupt|time.?out|resource|unavailable", re.IGNORECASE)
ADVICE = {
    400: "",
    401: " (check OPENAI_API_KEY; a URL from an agent's folder gets it only if --env names it too)",
    402: " (the account has no credit)",
    403: " (check that OPENAI_API_KEY may use this model)",
    404: " (check the model's name and the base URL)",
    422: "",
}
# "retryDelay": "19.5s" (Google), "Please try again in 1m2s" (OpenAI), "retry after 6 seconds" (Azure).
DURATION = r"(?:\d+(?:\.\d+)? ?[a-z]*)+"
DELAY = re.compile(
    rf"(?:retry[ _-]?(?:delay|after|in)|try again (?:in|after))_?(ms)?\W{{0,5}}({DURATION})", re.IGNORECASE
)
UNITS = {"ms": 0.001, "mil": 0.001, "m": 60.0, "h": 3600.0, "": 1.0}  # how a unit begins: its seconds


@dataclass(frozen=True)
class Attempt:
    """What one request came to."""

    outcome: Outcome
    lost: bool = False  # there is no reply, and the provider may bill it all the same
    wait: float | None = None  # seconds in which the provider asks for no calls
    blamed: str = ""  # where the provider names a field that it rejects: some models take no temperature
    misdirected: bool = False  # no chat server, or a wrong setting of it, unless it has replied before


@dataclass(frozen=True)
class ProviderError:
    """The error object of a response body, in OpenAI's form. Other providers omit parts of it."""

    message: str = ""
    codes: tuple[str, ...] = ()  # its `code`, `type` and `status`
    field: str = ""  # the request field that caused it


def failed(
    reason: str, *, lost: bool = False, wait: float | None = None, misdirected: bool = False
) -> Attempt:
    """A request without a reply that may be repeated."""
    return Attempt(Outcome("failed", reason=reason), lost=lost, wait=wait, misdirected=misdirected)


def classify(status: int, headers: Mapping[str, str], body: bytes, *, now: float) -> Attempt:
    """Classify a complete response.

    The names in `headers` are lower-case; `now` is in epoch seconds.
    """
    data = _parse(body)
    is_error = isinstance(data, dict) and bool(data.get("error"))
    if 200 <= status < 300 and isinstance(data, dict) and not is_error:
        feedback = data.get("promptFeedback")  # Gemini's, of a dialogue that it filters
        if data.get("choices") == [] and isinstance(feedback, dict) and feedback.get("blockReason"):
            data["choices"] = [{"finish_reason": "content_filter"}]
        if data.get("choices"):
            return _classify_completion(data)
    error = _error_of(data)
    reason = f"HTTP {status}: {error.message}" if error.message else f"HTTP {status}"
    if 200 <= status < 300:
        statuses = [int(code) for code in error.codes if re.fullmatch("[45]\\d\\d", code)]
        if not is_error and not (statuses and error.message):
            return failed(_described(body), lost=True, misdirected=True)
        status = statuses[0] if statuses else 500
    if "insufficient_quota" in (*error.codes, *error.message.split()):
        return Attempt(Outcome("refused", reason=f"{reason} (check plan and billing)"))
    if status not in RETRIED_STATUSES and status <= 500:
        if {"content_filter", "content_policy_violation"} & set(error.codes):
            return Attempt(Outcome("outcome", label="content_filter", reason=reason))
        if status == 413 or "context_length_exceeded" in error.codes or TOO_LONG.search(error.message):
            return Attempt(Outcome("outcome", label="context_length", reason=reason))
    if status in RETRIED_STATUSES or status >= 500:
        return failed(reason, wait=requested_wait(headers, body, now=now))
    # Some errors name the field only in the message: "Unsupported value: 'temperature' does not support 0".
    is_rejected = status in (400, 422) and REJECTED.search(" ".join((error.message, *error.codes)))
    blamed = (error.field or error.message) if is_rejected else ""
    reason += ADVICE.get(status, " (check the base URL)")
    return Attempt(Outcome("refused", reason=reason), blamed=blamed)


def requested_wait(headers: Mapping[str, str], body: bytes = b"", *, now: float) -> float | None:
    """Seconds from a header such as `retry-after-ms` or `retry-after` (seconds or an HTTP date), or the body.

    None where there is no value between 0 and LONGEST_HONOURED_WAIT.
    """
    candidates = []
    for name in sorted((name for name in headers if "retry-after" in name), key=len, reverse=True):
        value, unit = headers[name].strip(), "ms" if name.endswith("ms") else ""
        amount = re.fullmatch(DURATION, value, re.IGNORECASE)
        candidates.append(_seconds(value, unit) if amount else _epoch_seconds(value) - now)
    if said := DELAY.search(body[:10_000].decode("utf-8", "replace")):
        candidates.append(_seconds(said[2], said[1] or ""))
    return next((wait for wait in candidates if 0 < wait <= LONGEST_HONOURED_WAIT), None)


def back_off(failures: int, rng: random.Random) -> float:
    """Seconds to wait after this many failures: exponential back-off with full jitter."""
    longest = min(LONGEST_BACK_OFF, FIRST_BACK_OFF * 2.0 ** min(failures - 1, 10))
    return rng.uniform(0, longest)


def _described(body: bytes) -> str:
    """What a successful response is that is no chat completion."""
    if body.lstrip().startswith(b"<"):
        return "it answers with a web page, not with JSON: check the base URL, which often ends in /v1"
    if body.lstrip().startswith(b"data:"):
        return "it streams its replies though that was not asked for: turn that off"
    return "the response is no chat completion"


def _classify_completion(data: Mapping[str, object]) -> Attempt:
    choices = data["choices"]
    first = choices[0] if isinstance(choices, list) else None
    choice = first if isinstance(first, dict) else {}
    finish = choice["finish_reason"] if isinstance(choice.get("finish_reason"), str) else ""
    message = choice.get("message")
    end = NORMAL_END.match(finish)
    if not isinstance(message, dict) and end is None:
        message = {}
    if not isinstance(message, dict):
        return failed("the response has no message", lost=True, misdirected=True)
    usage = data["usage"] if isinstance(data.get("usage"), dict) else {}
    assert isinstance(usage, dict)
    text = _text_of(message.get("content"))
    refusal = _text_of(message.get("refusal"))
    reasoning = _text_of(message.get("reasoning_content")) or _text_of(message.get("reasoning"))
    reply = Outcome(
        "ok",
        text=text or refusal,
        finish=finish,
        reasoning=reasoning,
        tokens_in=_count(usage.get("prompt_tokens")),
        tokens_out=_count(usage.get("completion_tokens")),
    )
    if FAILED_END.search(finish):
        return failed(f"the reply was cut off by an error (finish_reason {clean(finish)})", lost=True)
    if end is None:
        return Attempt(replace(reply, verdict="outcome", label="content_filter"))
    if text.strip():
        return Attempt(reply)
    if refusal.strip():
        return Attempt(replace(reply, verdict="outcome", label="refusal"))
    if end[1]:
        return Attempt(replace(reply, verdict="outcome", label="length"))
    hint = "; all text is in reasoning_content: turn the server's reasoning parser off" if reasoning else ""
    return failed(f"an empty reply (finish_reason {clean(finish)}){hint}", lost=True, misdirected=True)


def _error_of(data: object) -> ProviderError:
    if isinstance(data, list):  # Google's form
        data = data[0] if data else None
    if not isinstance(data, dict):
        return ProviderError()
    error = data.get("error")
    if not isinstance(error, dict):  # other forms: {"error": "text"}, {"message": "text"}, {"detail": [...]}
        error = {**data, "message": error or data.get("message") or data.get("detail")}
    message = error.get("message") or ""
    field = str(error.get("param") or "")
    if isinstance(message, list) and message and isinstance(message[0], dict):  # others may echo the input
        first = message[0]
        place = first.get("loc")
        field = ".".join(map(str, place)) if isinstance(place, list) else str(place or "")
        message = f"{field}: {first.get('msg')}"
    return ProviderError(
        message=clean(message if isinstance(message, str) else json.dumps(message)),
        codes=tuple(str(error[name]) for name in ("code", "type", "status") if error.get(name)),
        field=field,
    )


def _parse(body: bytes) -> object:
    """Parse the body as JSON; None if it is not JSON."""
    try:
        return json.loads(body.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        return None


def _text_of(content: object) -> str:
    """The text of a message's content, which is a string or a list of parts, some of them with text."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return clean("".join(text for text in texts if isinstance(text, str)))


def clean(text: str) -> str:
    """Make a text encodable: replace lone surrogates by "?" and remove NUL characters."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "")


def _count(value: object) -> int:
    """A number of tokens, as the provider sent it; 0 for one that cannot be right."""
    return value if type(value) is int and 0 <= value <= LARGEST_COUNT else 0  # not isinstance: no bool


def _seconds(duration: str, unit: str) -> float:
    """Seconds of a duration such as 19.5s, 1m2s or 6 seconds; `unit` is that of a bare number."""
    amounts = re.findall(r"([\d.]+) ?([a-z]*)", duration.lower())
    begins = [next(begin for begin in UNITS if (own or unit).startswith(begin)) for _, own in amounts]
    return sum(float(number) * UNITS[begin] for (number, _), begin in zip(amounts, begins, strict=True))


def _epoch_seconds(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return math.nan
