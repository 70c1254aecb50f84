"""Read one response of a chat-completions endpoint. Pure: no network, no clock.

The HTTP status decides. If a 200 has an error object in place of a reply, its code decides. Error messages
are read for one thing only: that a dialogue is too long, for which servers have no common code.
"""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime

from prompt_r1.chat_template import encodable
from prompt_r1.environments.reply_text import reply_of
from prompt_r1.environments.sources import Busy, NoText, Refused, Reply, shown_reason

MAX_WAIT = 120.0  # seconds; a server that asks for a longer wait is asked again after this time
MAX_TOKEN_COUNT = 10_000_000  # No prompt or reply has more tokens: no model has such a context.
MAX_ERROR_CHARACTERS = 2000  # The rest of an error is not read.

BUSY_STATUSES = (408, 409, 425, 429)  # Every status from 500 on means busy too.
# A proxy has given up, but the server behind it may go on. 524 is Cloudflare's.
GATEWAY_TIMEOUTS = (504, 524)
WRONG_FOR_ALL = (401, 402, 403)  # key, credit, permission
FILTERED_CODES = ("content_filter", "content_policy_violation")
UNKNOWN_FIELD_CODES = ("unsupported_parameter", "unsupported_value", "unknown_parameter", "extra_forbidden")
# How servers say that a dialogue is too long, by a code or by words. Other errors name a length or a limit,
# too ("max_length must be positive"), so only whole phrases count.
TOO_LONG_CODES = ("context_length_exceeded", "exceed_context_size_error")  # OpenAI's and llama.cpp's
TOO_LONG_PHRASES = (
    "maximum context length is",  # OpenAI, vLLM, DeepSeek
    "longer than the maximum model length",  # vLLM
    "the model's context length is only",  # vLLM
    "exceeds the model's maximum context length",  # SGLang
    "longer than the model's context length",  # SGLang
    "exceeds the available context size",  # llama.cpp
    "exceeds the maximum number of tokens allowed",  # Gemini
    "prompt is too long",  # Anthropic
    "exceed context limit",  # Anthropic
    "request too large",  # OpenAI, if the request has more tokens than the account may send in a minute
)
# What a finish_reason means if it contains one of these words, in any letter case.
ENDS = {
    "error": "failed",  # OpenRouter, Mistral; network_error of Zhipu
    "abort": "failed",  # vLLM, SGLang
    "cancel": "failed",  # TensorRT-LLM
    "insufficient_system_resource": "failed",  # DeepSeek
    "filter": "content_filter",  # OpenAI and most others
    "safety": "content_filter",  # Gemini, if a proxy does not translate its words
    "prohibited": "content_filter",  # Gemini
    "blocklist": "content_filter",  # Gemini
    "sensitive": "content_filter",  # Zhipu
    "length": "length",  # OpenAI and most others; model_length of Mistral
    "max": "length",  # max_tokens of Anthropic, MAX_TOKENS of Gemini
    "limit": "length",  # token_limit and time_limit of IBM watsonx
    "context_window": "length",  # model_context_window_exceeded of Anthropic and Zhipu
}
ADVICE = {
    401: " (check OPENAI_API_KEY; a URL from a file gets it only if --env names it too)",
    402: " (the account has no credit)",
    403: " (check that OPENAI_API_KEY may use this model)",
    404: " (check the model's name and the base URL)",
}


def read_reply(status: int, headers: Mapping[str, str], body: bytes, *, now: float) -> Reply:
    """The reply in a complete response. Raises Busy or Refused, with the server's words.

    The names in `headers` are lower-case; `now` is in epoch seconds.
    """
    data = _object_of(body)
    error = data.get("error")
    # A 200 whose error is a text is read as a completion. If it has no reply, `NoText` shows the error.
    fields = error if isinstance(error, dict) else {}
    is_ok = 200 <= status < 300
    if is_ok and not any(fields.values()):
        return _read_completion(data, body)
    said = _words_of(data, body)
    reason = f"HTTP {status}"
    if "location" in headers:
        reason += f" to {headers['location']}"
    if said:
        reason += f": {said}"
    if is_ok:
        status = _status_of_error(fields)  # From here on, this status decides.
    codes = {str(fields.get(name)) for name in ("code", "type", "status")}
    if "insufficient_quota" in codes:
        raise Refused(f"{reason} (check plan and billing)", status=status, concerns_all=True)
    if codes.intersection(FILTERED_CODES):
        return Reply("", label="content_filter", reason=shown_reason(reason))
    if status == 413 or (status in (400, 422, 429) and _says_too_long(codes, said)):
        return Reply("", label="context_length", reason=shown_reason(reason))
    if status in BUSY_STATUSES or status >= 500:
        raise Busy(reason, wait=requested_wait(headers, now=now), may_be_billed=status in GATEWAY_TIMEOUTS)
    raise Refused(
        reason + ADVICE.get(status, ""),
        status=status,
        field=_unknown_field(data, fields) if status in (400, 422) else "",
        concerns_all=status in WRONG_FOR_ALL,
    )


def _says_too_long(codes: set[str], said: str) -> bool:
    """Whether an error with these codes and words says that the dialogue is too long."""
    if codes.intersection(TOO_LONG_CODES):
        return True
    return any(phrase in said.lower() for phrase in TOO_LONG_PHRASES)


def _status_of_error(error: Mapping[str, object]) -> int:
    """The status that an error inside a 200 names as its code; 503 (busy) if it names none."""
    code = str(error.get("code"))
    return int(code) if re.fullmatch(r"[45]\d\d", code) else 503


def _read_completion(data: Mapping[str, object], body: bytes) -> Reply:
    """The reply in a 200 without an error."""
    choice = _first_choice(data)
    sent = choice.get("message")
    message = sent if isinstance(sent, dict) else {}
    text, refusal = _text_of(message.get("content")), _text_of(message.get("refusal"))
    has_text = bool(text.strip())
    reasoning = _text_of(message.get("reasoning_content")) or _text_of(message.get("reasoning"))
    finish = str(choice.get("finish_reason") or "")
    end = next((end for word, end in ENDS.items() if word in finish.lower()), "stop")
    if end == "failed":
        raise Busy(f"the reply was cut off by an error (finish_reason {finish})", may_be_billed=True)
    label = ""
    if end == "content_filter":
        label = end
    elif not has_text and refusal.strip():
        label = "refusal"
    elif not has_text and end != "length":
        said = _words_of(data, body)
        raise NoText(f"no reply (check the base URL, which often ends in /v1) in: {said}")
    if end == "length":
        finish = end
    reply = reply_of(text if has_text else refusal, label=label, reasoning=reasoning, finish=finish)
    tokens_in, tokens_out = billed_tokens(data.get("usage"))
    return replace(reply, tokens_in=tokens_in, tokens_out=tokens_out)


def billed_tokens(usage: object) -> tuple[int, int]:
    """The tokens in and out that a reply is billed for; 0 where the server does not say.

    The forms of usage, each with an example and what it is billed for:

        OpenAI        prompt 30 with 10 cached, completion 25 with 20 of thinking, total 55     30, 25
        Gemini        prompt 30, completion 5, total 55: the thinking is only in the total      30, 25
        some proxies  prompt 30, 100 cached that are not in it, completion 5, total 135        130, 5

    In the last form, more tokens are cached than are in the prompt, by which it is recognised.
    """
    counts = usage if isinstance(usage, dict) else {}
    prompt = _count(counts.get("prompt_tokens"))
    completion = _count(counts.get("completion_tokens"))
    total = _count(counts.get("total_tokens"))
    details = counts.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    cache_reads = _count(counts.get("cache_read_input_tokens"))
    cache_writes = _count(counts.get("cache_creation_input_tokens"))
    cached = max(cached, cache_reads + cache_writes)
    if cached > prompt:  # So the prompt does not contain them.
        prompt += cached
    if prompt:  # Without it, the total says nothing about the output.
        completion = max(completion, total - prompt)
    return prompt, completion


def _count(value: object) -> int:
    """A number of tokens; 0 for anything that cannot be right."""
    return value if type(value) is int and 0 <= value <= MAX_TOKEN_COUNT else 0


def requested_wait(headers: Mapping[str, str], *, now: float) -> float | None:
    """The seconds for which a response asks for no calls, at most MAX_WAIT; None if it asks for none."""
    precise = _seconds(headers.get("retry-after-ms", ""), now=now) / 1000
    for seconds in (precise, _seconds(headers.get("retry-after", ""), now=now)):
        if seconds > 0:
            return min(seconds, MAX_WAIT)
    return None


def _seconds(value: str, *, now: float) -> float:
    """A number of seconds, also given as an HTTP date from now; NaN for anything else."""
    with suppress(ValueError):
        return float(value)
    with suppress(ValueError, TypeError, OverflowError, IndexError):
        return parsedate_to_datetime(value).timestamp() - now
    return math.nan


def _words_of(data: Mapping[str, object], body: bytes) -> str:
    """The message of an error, or else the beginning of the body."""
    error = data.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    for said in (inner, data.get("message")):
        if said and isinstance(said, str):
            return clean(said)[:MAX_ERROR_CHARACTERS]
    return clean(body[:MAX_ERROR_CHARACTERS].decode(errors="replace")).strip()


def _unknown_field(data: Mapping[str, object], error: Mapping[str, object]) -> str:
    """The field of the request that the server does not know, from OpenAI's `param` or FastAPI's `loc`."""
    if error.get("code") in UNKNOWN_FIELD_CODES:
        return str(error.get("param") or "")
    details = data.get("detail")
    for detail in details if isinstance(details, list) else []:
        if isinstance(detail, dict) and detail.get("type") in UNKNOWN_FIELD_CODES:
            place = detail.get("loc")
            return str(place[-1]) if isinstance(place, list) and place else ""
    return ""


def _object_of(body: bytes) -> dict[str, object]:
    """The JSON object of a body, or the first of a list, as Google sends errors. {} for anything else."""
    with suppress(ValueError, RecursionError):
        value = json.loads(body, strict=False)
        first = value[0] if isinstance(value, list) and value else value
        return first if isinstance(first, dict) else {}
    return {}


def _first_choice(data: Mapping[str, object]) -> dict[str, object]:
    """The first of the choices; {} if there is none."""
    choices = data.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _text_of(content: object) -> str:
    """The text of a message's content: a string, or a list of parts; only text parts count."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else None
        if isinstance(text, str):
            texts.append(text)
    return clean("".join(texts))


def clean(text: str) -> str:
    """A text without lone surrogates and NUL characters."""
    return encodable(text).replace("\0", "")
