"""Read one response of a chat-completions endpoint. Pure: no network, no clock.

The HTTP status decides. If a 200 has an error object in place of a reply, its code decides. Error messages
are read for one thing only: that a dialogue is too long, for which servers have no common code.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime

from prompt_r1.environments.reply_text import reply_of
from prompt_r1.environments.sources import REPLY_LIMITS, Busy, NoText, Refused, Reply

MAX_WAIT = 120.0  # seconds; a server that asks for a longer wait is asked again after this time
MAX_CREDIBLE_WAIT = 86400.0  # seconds; a longer requested wait is ignored
MAX_TOKEN_COUNT = 10_000_000  # No prompt or reply has more tokens: no model has such a context.
MAX_ERROR_CHARACTERS = 2000  # The rest of an error is not read.

BUSY_STATUSES = (408, 409, 425, 429)  # Every status from 500 on means busy too.
# A proxy has given up, but the server behind it may go on. 524 is Cloudflare's.
GATEWAY_TIMEOUTS = (504, 524)
WRONG_FOR_ALL = (401, 402, 403)  # key, credit, permission
FILTERED_CODES = ("content_filter", "content_policy_violation")
UNKNOWN_FIELD_CODES = ("unsupported_parameter", "unsupported_value", "unknown_parameter", "extra_forbidden")
# How servers say that a dialogue is too long. Other errors also name a length or a limit ("max_length must be
# positive"), so only whole phrases count.
TOO_LONG = re.compile(
    r"context.?(length|window|size|limit).{0,10}exceeded"  # also the code context_length_exceeded
    r"|exceed.{0,40}context.?(length|window|size|limit)"  # also the code exceed_context_size_error
    r"|exceed\w* (the )?model('s)? token limit"
    r"|(prompt|inputs?).{0,20}(length|tokens?).{0,30}exceed|tokens in the prompt cannot exceed"
    r"|(prompt|inputs?|context|conversation)( is| are)? too (long|large)|too (long|large) for .{0,12}model"
    r"|longer than the (model|maximum model|maximum context|context)"
    r"|maximum (context|prompt|input|model) length (is|of) \d"
    r"|range of input length|inputs`.{0,40} must (be <=|have less than) \d",
    re.IGNORECASE,
)
# If a reply has no ordinary end, its finish_reason in lower case contains one of these words.
FAILED_ENDS = ("error", "abort", "cancel", "resource")  # resource: insufficient_system_resource of DeepSeek
FILTERED_ENDS = ("filter", "safety", "block", "sensitive")  # safety: Gemini; sensitive: Zhipu
FULL_ENDS = ("length", "max", "limit", "trunc")
# The names under which servers count the tokens that were read from a cache, and written to it. A server may
# send the same number under several of these names.
CACHE_READS = ("cached_tokens", "cache_read_input_tokens", "cache_read_tokens", "prompt_cache_hit_tokens")
CACHE_WRITES = ("cache_creation_input_tokens", "cache_creation_tokens", "cache_write_tokens")
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
    choice = _first_choice(data)
    error = data.get("error") or choice.get("error")
    # A 200 whose error is a text is read as a completion. If it has no reply, `NoText` shows the error.
    fields = error if isinstance(error, dict) else {}
    is_ok = 200 <= status < 300
    if is_ok and not any(fields.values()):
        return _read_completion(data, choice, body)
    said = _words_of(data, error, body)
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
    if status < 500 and codes.intersection(FILTERED_CODES):
        return Reply("", label="content_filter", reason=reason)
    is_about_dialogue = status in (400, 422)
    unknown_field = _unknown_field(data, fields) if is_about_dialogue else ""
    says_too_long = is_about_dialogue and not unknown_field and _says_too_long(fields, codes, said)
    # OpenAI says so of a request that is larger than the limit per minute: it will never be accepted.
    never_fits = status == 429 and "request too large" in said.lower()
    if status == 413 or says_too_long or never_fits:
        return Reply("", label="context_length", reason=reason)
    if status in BUSY_STATUSES or status >= 500:
        raise Busy(reason, wait=requested_wait(headers, now=now), may_be_billed=status in GATEWAY_TIMEOUTS)
    raise Refused(
        reason + ADVICE.get(status, ""),
        status=status,
        field=unknown_field,
        concerns_all=status in WRONG_FOR_ALL,
    )


def _says_too_long(error: Mapping[str, object], codes: Collection[str], said: str) -> bool:
    """Whether an error says that the dialogue is too long.

    OpenAI's errors name max_tokens in two cases. If the error also mentions the context, the dialogue is too
    long, because it leaves no room for the reply. Otherwise the limit is too large for the model.
    """
    is_wrong_limit = error.get("param") in REPLY_LIMITS and "context" not in said
    return not is_wrong_limit and TOO_LONG.search(" ".join([*codes, said])) is not None


def _status_of_error(error: Mapping[str, object]) -> int:
    """The status that an error inside a 200 names as its code; 503 (busy) if it names none."""
    code = re.fullmatch(r"([45]\d\d)(\.0)?", str(error.get("code")))
    return int(code[1]) if code else 503


def _read_completion(data: Mapping[str, object], choice: Mapping[str, object], body: bytes) -> Reply:
    """The reply in a 200 without an error."""
    sent = choice.get("message")
    message = sent if isinstance(sent, dict) else {}
    text, refusal = _text_of(message.get("content")), _text_of(message.get("refusal"))
    has_text = bool(text.strip())
    reasoning = _text_of(message.get("reasoning_content")) or _text_of(message.get("reasoning"))
    finish = str(choice.get("finish_reason") or "")
    if _contains(finish, FAILED_ENDS):
        raise Busy(f"the reply was cut off by an error (finish_reason {finish})", may_be_billed=True)
    label = ""
    if _contains(finish, FILTERED_ENDS):
        label = "content_filter"
    elif not has_text and refusal.strip():
        label = "refusal"
    elif not has_text and _contains(finish, FULL_ENDS):
        label = "length"
    elif not has_text:
        said = _words_of(data, data.get("error"), body)
        raise NoText(f"no reply (check the base URL, which often ends in /v1) in: {said}")
    if _contains(finish, FULL_ENDS):
        finish = "length"  # Each provider has a word of its own.
    reply = reply_of(text if has_text else refusal, label=label, reasoning=reasoning, finish=finish)
    tokens_in, tokens_out = billed_tokens(data.get("usage"))
    return replace(reply, tokens_in=tokens_in, tokens_out=tokens_out)


def billed_tokens(usage: object) -> tuple[int, int]:
    """The tokens in and out that a reply is billed for; 0 where the server does not say.

    The forms of usage, each with an example and what it is billed for:

        OpenAI        prompt 30 with 10 cached, completion 25 with 20 of thinking, total 55     30, 25
        Anthropic     input 20, beside it 10 cached, output 5, no total                         30, 5
        some proxies  prompt 20, beside it 10 cached, completion 5, total 35                    30, 5
        some servers  prompt 30, completion 5, beside it 20 of thinking, total 55               30, 25

    What the total has beyond the prompt is output.
    """
    counts = _counts_of(usage)
    prompt = counts["prompt_tokens"] or counts["input_tokens"]
    completion = counts["completion_tokens"] or counts["output_tokens"]
    total = counts["total_tokens"]
    cached = max(counts[name] for name in CACHE_READS) + max(counts[name] for name in CACHE_WRITES)
    thinking = counts["reasoning_tokens"]
    if thinking > completion:  # So the completion does not contain it.
        completion += thinking
    from_anthropic = not counts["prompt_tokens"] and not total
    # This is the case of "some proxies". If there are as many cached tokens as tokens of thinking, the total
    # does not say which of them it contains.
    is_beside = total == prompt + cached + completion and thinking != cached
    if from_anthropic or cached > prompt or is_beside:
        prompt += cached
    if prompt:  # Without it, the total says nothing about the output.
        completion = max(completion, total - prompt)
    return prompt, completion


def _counts_of(usage: object) -> Counter[str]:
    """The numbers of tokens in a usage and its details, by name. Of a name that comes twice, the larger."""
    counts = Counter[str]()
    if isinstance(usage, dict):
        details = [value for value in usage.values() if isinstance(value, dict)]
        for fields in [usage, *details]:
            for name, value in fields.items():
                counts[name] = max(counts[name], _count(value))
    return counts


def requested_wait(headers: Mapping[str, str], *, now: float) -> float | None:
    """The seconds for which a response asks for no calls, at most MAX_WAIT; None if it asks for none."""
    precise = _seconds(headers.get("retry-after-ms", ""), now=now) / 1000
    for seconds in (precise, _seconds(headers.get("retry-after", ""), now=now)):
        if 0 < seconds <= MAX_CREDIBLE_WAIT:
            return min(seconds, MAX_WAIT)
    return None


def _seconds(value: str, *, now: float) -> float:
    """A number of seconds, also given as an HTTP date from now; NaN for anything else."""
    with suppress(ValueError):
        return float(value)
    with suppress(ValueError, TypeError, OverflowError, IndexError):
        return parsedate_to_datetime(value).timestamp() - now
    return math.nan


def _words_of(data: Mapping[str, object], error: object, body: bytes) -> str:
    """The message of an error, or else the beginning of the body."""
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
    """Make a text encodable: replace lone surrogates by "?" and remove NUL characters."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "")


def _contains(finish: str, words: tuple[str, ...]) -> bool:
    """Whether a finish_reason contains one of the words."""
    return any(word in finish.lower() for word in words)


def _count(value: object) -> int:
    """A number of tokens, which may be sent as 7, 7.0 or "7"; 0 for anything that cannot be right."""
    match = re.fullmatch(r"(\d{1,8})(\.0)?", str(value))
    return int(match[1]) if match and int(match[1]) <= MAX_TOKEN_COUNT else 0
