"""Classify an endpoint's responses; the wait before a retry. Pure.

Providers fail in many ways. `classify` gives each response one of four verdicts:

    ok       a reply
    outcome  no ordinary reply, but one that the dialogue caused (refusal, content filter, context too long):
             the game continues with the text there is, and the journal records the label
    retry    the same call may succeed later
    fatal    no call can succeed: wrong key, no credit, no such model, a malformed request
"""

import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Literal

from prompt_r1.errors import EnvError, FatalEnvError

Verdict = Literal["ok", "outcome", "retry", "fatal"]

LONGEST_HONOURED_WAIT = 120.0  # seconds; longer requested waits are ignored
LARGEST_COUNT = 10_000_000  # tokens of a prompt or a reply; more than any model's context
FIRST_BACK_OFF, LONGEST_BACK_OFF = 0.5, 30.0  # seconds

# Some models reject these with a 400; the client then drops them.
ADAPTABLE_FIELDS = ("max_tokens", "temperature", "top_p", "stop")
RETRIED_STATUSES = (408, 409, 425, 429)
BUSY_STATUSES = (429, 503)
TOO_LONG = re.compile(
    r"context.?(length|window|size)|(prompt|input|request) is too long|maximum number of tokens",
    re.IGNORECASE,
)
ADVICE = {
    401: "check OPENAI_API_KEY",
    402: "the account has no credit",
    403: "check that OPENAI_API_KEY may use this model",
    404: "check the model's name and the base URL",
}


@dataclass(frozen=True)
class Outcome:
    """The meaning of one response, or of a call after all its attempts."""

    verdict: Verdict
    text: str = ""  # the reply
    label: str = ""  # of an "outcome": refusal, content_filter, length, context_length or empty
    reason: str = ""  # why there is no reply; the provider's message where it sent one
    finish: str = ""  # the provider's finish_reason
    reasoning: str = ""  # the model's thinking: recorded, never part of the reply
    rejected: str = ""  # the field of ADAPTABLE_FIELDS that the provider rejects
    wait: float | None = None  # seconds to wait, as requested by the provider
    busy: bool = False  # the provider is overloaded: other calls should wait too
    tokens_in: int = 0
    tokens_out: int = 0
    written: int = 0  # characters of the text and the reasoning, before they are cut
    lost: int = 0  # attempts without a reply that the provider may have billed


@dataclass(frozen=True)
class ProviderError:
    """The error object of a response body, in OpenAI's form. Other providers omit parts of it."""

    message: str
    codes: tuple[str, ...]  # its `code` and `type`
    field: str  # the request field that caused it


def classify(status: int, headers: Mapping[str, str], body: bytes, *, now: float) -> Outcome:
    """Classify a complete response.

    The names in `headers` are lower-case; `now` is in epoch seconds.
    """
    data = _parse(body)
    error = _error_of(data)
    wait = requested_wait(headers, now=now)
    reason = f"HTTP {status}: {error.message}" if error.message else f"HTTP {status}"
    words = error.message.split() if status >= 400 else ()  # a reply may hold any word
    if "insufficient_quota" in (*error.codes, *words):
        return Outcome("fatal", reason=f"{reason} (check plan and billing)")
    if 200 <= status < 300:
        return _classify_completion(data, error, wait)
    if status in RETRIED_STATUSES or status >= 500:
        return Outcome("retry", reason=reason, wait=wait, busy=status in BUSY_STATUSES)
    if status in (400, 413, 422):
        return _classify_bad_request(status, error, reason)
    advice = ADVICE.get(status, "check the base URL")
    return Outcome("fatal", reason=f"{reason} ({advice})")


def reply_of(outcome: Outcome, name: str) -> str:
    """The reply; "" for an outcome without text. Raises EnvError or FatalEnvError with `name` in front."""
    if outcome.verdict == "retry":
        raise EnvError(f"{name} did not reply: {outcome.reason}")
    if outcome.verdict == "fatal":
        raise FatalEnvError(f"{name} cannot be used: {outcome.reason}")
    return outcome.text


def without_thinking(outcome: Outcome) -> Outcome:
    """The outcome with the <think> block of its text as its reasoning: not every server separates them.

    A block without end leaves no reply. A chat template may have opened the block in the prompt.
    """
    thought, end_tag, text = outcome.text.rpartition("</think>")
    if not end_tag and text.lstrip().startswith("<think>"):
        thought, text = text, ""
    elif not end_tag:
        return outcome
    thought, text = thought.strip().removeprefix("<think>").strip(), text.strip()
    stripped = replace(outcome, text=text, reasoning=outcome.reasoning or thought)
    if text or outcome.verdict != "ok":
        return stripped
    return replace(stripped, verdict="outcome", label="length" if outcome.finish == "length" else "empty")


def requested_wait(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds from `retry-after-ms`, else from `retry-after` (seconds or an HTTP date).

    None where there is no value between 0 and LONGEST_HONOURED_WAIT.
    """
    candidates = [
        _number(headers.get("retry-after-ms", "")) / 1000,
        _number(headers.get("retry-after", "")),
        _epoch_seconds(headers.get("retry-after", "")) - now,
    ]
    return next((wait for wait in candidates if 0 < wait <= LONGEST_HONOURED_WAIT), None)


def back_off(failures: int, rng: random.Random) -> float:
    """Seconds to wait after this many failures: exponential back-off with full jitter."""
    longest = min(LONGEST_BACK_OFF, FIRST_BACK_OFF * 2 ** (failures - 1))
    return rng.uniform(0, longest)


def model_names(body: bytes) -> set[str]:
    """The ids in an endpoint's list of models; empty where the body is not such a list."""
    data = _parse(body)
    models = data.get("data") if isinstance(data, dict) else None
    if not isinstance(models, list):
        return set()
    return {str(model.get("id")) for model in models if isinstance(model, dict)}


def _classify_completion(data: object, error: ProviderError, wait: float | None) -> Outcome:
    if not isinstance(data, dict):
        return Outcome("retry", reason="the response is not a JSON object", wait=wait, lost=1)
    if data.get("error"):
        return Outcome("retry", reason=f"an error instead of a completion: {error.message}", wait=wait)
    choices = data.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    choice = first if isinstance(first, dict) else {}
    usage = data["usage"] if isinstance(data.get("usage"), dict) else {}
    message = choice.get("message")
    if not isinstance(message, dict):
        return Outcome("retry", reason="the response has no choices", wait=wait, lost=1)
    text = _text_of(message.get("content"))
    refusal = _text_of(message.get("refusal"))
    finish = choice.get("finish_reason")
    reply = Outcome(
        "ok",
        text=text or refusal,
        finish=finish if isinstance(finish, str) else "",
        reasoning=_text_of(message.get("reasoning_content")) or _text_of(message.get("reasoning")),
        tokens_in=_count(usage.get("prompt_tokens")),
        tokens_out=_count(usage.get("completion_tokens")),
    )
    if finish == "content_filter":
        return replace(reply, verdict="outcome", label="content_filter")
    if text.strip():
        return reply
    if refusal.strip():
        return replace(reply, verdict="outcome", label="refusal")
    if finish == "length":
        return replace(reply, verdict="outcome", label="length")
    return Outcome("retry", reason=f"an empty reply (finish_reason {finish})", wait=wait, lost=1)


def _classify_bad_request(status: int, error: ProviderError, reason: str) -> Outcome:
    if {"content_filter", "content_policy_violation"} & set(error.codes):
        return Outcome("outcome", label="content_filter", reason=reason)
    if status == 413 or "context_length_exceeded" in error.codes or TOO_LONG.search(error.message):
        return Outcome("outcome", label="context_length", reason=reason)
    # Some errors name the field only in the message: "Unsupported value: 'temperature' does not support 0".
    described = error.field or error.message
    rejected = [name for name in ADAPTABLE_FIELDS if re.search(rf"\b{name}\b", described)]
    return Outcome("fatal", reason=reason, rejected=rejected[0] if rejected else "")


def _error_of(data: object) -> ProviderError:
    if isinstance(data, list):  # Google's form
        data = data[0] if data else None
    if not isinstance(data, dict):
        return ProviderError("", (), "")
    error = data.get("error")
    if not isinstance(error, dict):  # other forms: {"error": "text"}, {"message": "text"}, {"detail": [...]}
        error = {**data, "message": error or data.get("message") or data.get("detail")}
    message = error.get("message") or ""
    return ProviderError(
        message=clean(message if isinstance(message, str) else json.dumps(message)),
        codes=(str(error.get("code")), str(error.get("type"))),
        field=str(error.get("param") or ""),
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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _epoch_seconds(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return math.nan
