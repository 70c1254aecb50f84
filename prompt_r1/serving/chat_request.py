"""The body of POST /v1/chat/completions, as a question for the pair."""

import json
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields

from prompt_r1.playing import Limits

MOST_BYTES = 1_000_000  # of a request
# Fields that would change the form of the answer. Others that we do not know are ignored, as elsewhere.
UNSUPPORTED = ("tools", "functions", "response_format", "logprobs", "stop", "modalities", "audio")
LIMITS = {f"max_{field.name}" for field in fields(Limits)}


class BadRequest(Exception):
    """A request that cannot be answered: one sentence, and the field that is wrong."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for."""

    model: str
    question: str
    stream: bool
    include_usage: bool  # in a stream: a last chunk with the usage
    include_reasoning: bool  # the dialogue of agent and environment
    temperature: float | None
    seed: str
    limits: Limits


def read_request(content: bytes, limits: Limits) -> ChatRequest:
    """Read a request, which may lower `limits`. Raises BadRequest."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    for field in UNSUPPORTED:
        if body.get(field) not in (None, False, [], {"type": "text"}, ["text"]):
            raise BadRequest(f"`{field}` is not supported: the pair answers with plain text", field)
    if body.get("n") not in (None, 1):
        raise BadRequest("`n` must be 1: ask again for another answer", "n")
    # Limits are never ignored, except OpenAI's on tokens, which its clients send with every request.
    for field in sorted(key for key in body if key.startswith("max_")):
        if field not in LIMITS | {"max_tokens", "max_completion_tokens"}:
            known = ", ".join(sorted(LIMITS))
            raise BadRequest(f"there is no limit {reprlib.repr(field)}: there are {known}", field[:40])
    model = body.get("model")
    if not isinstance(model, str):
        raise BadRequest("`model` must be a string", "model")
    options = body.get("stream_options") or {}
    seed = body.get("seed")
    return ChatRequest(
        model=model,
        question=question_of(body.get("messages")),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        include_reasoning=bool(body.get("include_reasoning")),
        temperature=_number(body, "temperature"),
        seed="0" if seed is None else str(seed).encode("utf-8", "replace").decode(),  # no lone surrogates
        limits=_lower(limits, body),
    )


def question_of(messages: object) -> str:
    """The question in the messages of a chat: the last one, below the earlier ones of user and assistant.

    System messages are left out: the agent was trained with an instruction of its own. Raises BadRequest.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("`messages` must be a list of messages", "messages")
    lines = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadRequest("each of `messages` must be an object with role and content", "messages")
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise BadRequest(f"a message has the role {reprlib.repr(role)}: not supported", "messages")
        lines.append((str(role), _content(message.get("content"))))
    role, question = lines.pop()
    if role != "user" or not question.strip():
        raise BadRequest("the last of `messages` must be a question of the user", "messages")
    earlier = [f"{role}: {text}" for role, text in lines if role in ("user", "assistant")]
    if not earlier:
        return question.strip()
    return "\n".join(["Earlier messages:", *earlier, "", f"The question now: {question.strip()}"])


def _content(content: object) -> str:
    """The text of a message: a string, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    raise BadRequest("the content of a message must be text or a list of text parts", "messages")


def _number(body: Mapping[str, object], field: str) -> float | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise BadRequest(f"`{field}` must be a number of at least 0", field)
    return float(value)


def _lower(limits: Limits, body: Mapping[str, object]) -> Limits:
    """The stricter of the server's limits and those of a request; None and absent: no limit."""

    def stricter(ours: float | None, field: str) -> float | None:
        return min((limit for limit in (ours, _number(body, field)) if limit is not None), default=None)

    turns, calls = stricter(limits.turns, "max_turns"), stricter(limits.calls, "max_calls")
    return Limits(
        turns=None if turns is None else math.ceil(turns),
        calls=None if calls is None else math.ceil(calls),
        usd=stricter(limits.usd, "max_usd"),
        seconds=stricter(limits.seconds, "max_seconds"),
    )
