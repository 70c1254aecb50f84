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
UNSUPPORTED = ("tools", "functions", "response_format", "logprobs", "modalities", "audio")
SYSTEM_ROLES = ("system", "developer")
TOOLS = ("tools", "functions")
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
    system: str  # the system messages, if the environment gets them; "": none
    system_to: str  # who gets the system messages: environment or agent; "": there are none
    stop: tuple[str, ...]  # texts at which the answer is cut


def read_request(content: bytes, limits: Limits, *, system: str, history: str) -> ChatRequest:
    """Read a request, which may lower `limits`; `system` and `history` are policies. Raises BadRequest."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    for field in UNSUPPORTED:
        if body.get(field) not in (None, False, [], {"type": "text"}, ["text"]):
            reason = (
                "the agent's only tool is its environment"
                if field in TOOLS
                else "the pair answers with plain text"
            )
            raise BadRequest(f"`{field}` is not supported: {reason}", field)
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
    if not isinstance(options, dict):
        raise BadRequest("`stream_options` must be an object", "stream_options")
    instructions, question = question_of(body.get("messages"), system=system, history=history)
    seed = body.get("seed")
    return ChatRequest(
        model=model,
        question=question,
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        include_reasoning=_flag(body, "include_reasoning"),
        temperature=_number(body, "temperature"),
        seed="0" if seed is None else str(seed).encode("utf-8", "replace").decode(),  # no lone surrogates
        limits=_lower(limits, body),
        system=instructions if system == "environment" else "",
        system_to=system if instructions else "",
        stop=_stop(body.get("stop")),
    )


def question_of(messages: object, *, system: str, history: str) -> tuple[str, str]:
    """The system messages as one text ("": none), and the question: the last of the messages.

    With `history` "join", earlier messages of user and assistant stand above the question; with "last", they
    are left out. With `system` "agent", system messages stand above the question too. Raises BadRequest.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("`messages` must be a list of messages", "messages")
    lines = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadRequest("each of `messages` must be an object with role and content", "messages")
        role = message.get("role")
        if role not in (*SYSTEM_ROLES, "user", "assistant"):
            raise BadRequest(f"a message has the role {reprlib.repr(role)}: not supported", "messages")
        lines.append((str(role), _content(message.get("content"))))
    role, question = lines.pop()
    if role != "user" or not question.strip():
        raise BadRequest("the last of `messages` must be a question of the user", "messages")
    question = question.strip()
    instructions = "\n".join(text for role, text in lines if role in SYSTEM_ROLES and text.strip())
    if instructions and system == "refuse":
        raise BadRequest("system messages are refused by this server: see --system", "messages")
    earlier = [f"{role}: {text}" for role, text in lines if role not in SYSTEM_ROLES]
    if earlier and history == "join":
        question = "\n".join(["Earlier messages:", *earlier, "", f"The question now: {question}"])
    if instructions and system == "agent":
        question = f"{instructions}\n\n{question}"
    return instructions, question


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


def _flag(body: Mapping[str, object], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"`{field}` must be true or false", field)
    return bool(value)


def _stop(value: object) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest("`stop` must be a text or a list of texts, none of them empty", "stop")
    return tuple(texts)


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
