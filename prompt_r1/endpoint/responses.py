"""What a chat-completions endpoint's response means, and how long to wait before the same call again. Pure.

Providers fail in many ways; `classify` brings each to one of four verdicts:

    ok       a reply
    outcome  no plain reply, but the environment's own doing (refusal, content filter, dialogue too long):
             the game goes on with what text there is, and the run counts it under its label
    retry    the same call may succeed a moment later
    fatal    no call can succeed: wrong key, no credit, no such model, a request that is not understood
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

LONGEST_HONOURED_WAIT = 120.0  # seconds; a provider that asks for more is not believed
FIRST_BACK_OFF, LONGEST_BACK_OFF = 0.5, 30.0

# Newer models refuse these with a 400; the client then goes on without them.
ADAPTABLE_FIELDS = (
    "max_tokens", "temperature", "top_p", "stop",
    "return_token_ids", "stop_token_ids", "skip_special_tokens",  # vLLM's own
)  # fmt: skip
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
    """What one attempt came to."""

    verdict: Verdict
    text: str = ""  # the reply
    label: str = ""  # of an "outcome": refusal, content_filter, length or context_length
    reason: str = ""  # why there is no reply, in the provider's words where it has any
    finish: str = ""  # why the model stopped, in the provider's word
    reasoning: str = ""  # the model's own thinking: for the record, never the reply
    rejected: str = ""  # the adaptable request field that the provider complains of
    wait: float | None = None  # seconds that the provider asks to wait
    busy: bool = False  # the provider is overloaded, not only this call
    tokens_in: int = 0
    tokens_out: int = 0
    token_ids: tuple[int, ...] = ()  # of a text completion, where the server tells them


@dataclass(frozen=True)
class ProviderError:
    """The error object of a response body. OpenAI's form; others leave parts out."""

    message: str
    codes: tuple[str, ...]  # its `code` and `type`
    field: str  # the request field that it is about


def classify(status: int, headers: Mapping[str, str], body: bytes, *, now: float) -> Outcome:
    """The meaning of a whole response. The names in `headers` are lower-case; `now` is in epoch seconds."""
    data = _parse(body)
    error = _error_of(data)
    wait = requested_wait(headers, now=now)
    reason = f"HTTP {status}: {error.message}" if error.message else f"HTTP {status}"
    if "insufficient_quota" in (*error.codes, *error.message.split()):
        return Outcome("fatal", reason=f"{reason} (check plan and billing)")
    if 200 <= status < 300:
        return _classify_completion(data, error, wait)
    if status in RETRIED_STATUSES or status >= 500:
        return Outcome("retry", reason=reason, wait=wait, busy=status in BUSY_STATUSES)
    if status in (400, 413, 422):
        return _classify_bad_request(status, error, reason)
    advice = ADVICE.get(status, "check the base URL")
    return Outcome("fatal", reason=f"{reason} ({advice})")


def reply_of(outcome: Outcome, who: str) -> str:
    """The reply; "" where the environment's own doing left none. Raises EnvError or FatalEnvError."""
    if outcome.verdict == "retry":
        raise EnvError(f"{who} did not reply: {outcome.reason}")
    if outcome.verdict == "fatal":
        raise FatalEnvError(f"{who} refuses to work: {outcome.reason}")
    return outcome.text


def requested_wait(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds from `retry-after-ms`, else from `retry-after` (seconds or an HTTP date), if believable."""
    candidates = [
        _number(headers.get("retry-after-ms", "")) / 1000,
        _number(headers.get("retry-after", "")),
        _epoch_seconds(headers.get("retry-after", "")) - now,
    ]
    return next((wait for wait in candidates if 0 < wait <= LONGEST_HONOURED_WAIT), None)


def back_off(failures: int, rng: random.Random) -> float:
    """Full jitter: anything from 0 to an upper limit that doubles with each failure."""
    return rng.uniform(0, min(LONGEST_BACK_OFF, FIRST_BACK_OFF * 2 ** (failures - 1)))


def model_names(body: bytes) -> set[str]:
    """The ids in an endpoint's list of models; none where the body is something else."""
    data = _parse(body)
    models = data.get("data") if isinstance(data, dict) else None
    return {str(m.get("id")) for m in models if isinstance(m, dict)} if isinstance(models, list) else set()


def _classify_completion(data: object, error: ProviderError, wait: float | None) -> Outcome:
    if not isinstance(data, dict):
        return Outcome("retry", reason="the response is not a JSON object", wait=wait)
    if data.get("error"):
        return Outcome("retry", reason=f"an error instead of a completion: {error.message}", wait=wait)
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    usage = data["usage"] if isinstance(data.get("usage"), dict) else {}
    if isinstance(choice, dict) and isinstance(choice.get("text"), str):
        return _classify_text(choice, usage)
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        return Outcome("retry", reason="the response has no choices", wait=wait)
    text = _joined(message.get("content"))
    refusal = _joined(message.get("refusal"))
    finish = choice.get("finish_reason")
    reply = Outcome(
        "ok",
        text=text or refusal,
        finish=finish if isinstance(finish, str) else "",
        reasoning=_joined(message.get("reasoning_content")) or _joined(message.get("reasoning")),
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
    return Outcome("retry", reason=f"an empty reply (finish_reason {finish})", wait=wait)


def _classify_text(choice: Mapping[str, object], usage: Mapping[str, object]) -> Outcome:
    """A text completion; an empty one is what the model wrote."""
    ids = choice.get("token_ids")
    known = isinstance(ids, list) and all(isinstance(token, int) for token in ids)
    return Outcome(
        "ok",
        text=clean(str(choice["text"])),
        finish=str(choice.get("finish_reason")),
        tokens_in=_count(usage.get("prompt_tokens")),
        tokens_out=_count(usage.get("completion_tokens")),
        token_ids=tuple(ids) if known else (),  # type: ignore[arg-type]
    )


def _classify_bad_request(status: int, error: ProviderError, reason: str) -> Outcome:
    if {"content_filter", "content_policy_violation"} & set(error.codes):
        return Outcome("outcome", label="content_filter", reason=reason)
    if status == 413 or "context_length_exceeded" in error.codes or TOO_LONG.search(error.message):
        return Outcome("outcome", label="context_length", reason=reason)
    # Without a field's name the message is searched: "Unsupported value: 'temperature' does not support 0".
    rejected = [name for name in ADAPTABLE_FIELDS if re.search(rf"\b{name}\b", error.field or error.message)]
    return Outcome("fatal", reason=reason, rejected=rejected[0] if rejected else "")


def _error_of(data: object) -> ProviderError:
    if isinstance(data, list):  # Google
        data = data[0] if data else None
    if not isinstance(data, dict):
        return ProviderError("", (), "")
    error = data.get("error")
    if not isinstance(error, dict):  # others: {"error": "text"}, {"message": "text"}, {"detail": [...]}
        error = {**data, "message": error or data.get("message") or data.get("detail")}
    message = error.get("message") or ""
    return ProviderError(
        message=clean(message if isinstance(message, str) else json.dumps(message)),
        codes=(str(error.get("code")), str(error.get("type"))),
        field=str(error.get("param") or ""),
    )


def _parse(body: bytes) -> object:
    """The body's JSON; None if it is something else."""
    try:
        return json.loads(body.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        return None


def _joined(content: object) -> str:
    """The text of a message's content: a text, or a list of parts of which those with text count."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return clean("".join(text for text in texts if isinstance(text, str)))


def clean(text: str) -> str:
    """Text that can be encoded, stored and sent on: lone surrogates become "?", NUL characters go."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "")


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


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
