"""OpenAI's chat completions, without a server: read a request, and write a game or an error.

read_request        the body of a request → what it asks for
completion, chunk   a game → a response, or a part of a stream
failure_of          an error → its status and its body
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import AgentUnusable, EnvError, LimitReached, QuestionTooLong, Resumable, UsageError
from prompt_r1.pair.dialogue import LABELS, Piece
from prompt_r1.programs.reading import is_finite_number, json_object
from prompt_r1.programs.text import without_keys
from prompt_r1.types import Trajectory

Body = dict[str, object]
T = TypeVar("T")

# OpenAI's client repeats a request after a status of 408, 409, 429 and from 500 on, unless a header says that
# it should not. After these errors, a repeated request would fail again.
FINAL = ("time_limit", "budget_exhausted", "agent_unusable", "environment_unusable", "internal_error")
# These fields ask for a kind of answer that the pair cannot give, unless they are empty or have this value.
UNSUPPORTED = {
    "tools": None,
    "functions": None,
    "logprobs": None,
    "audio": None,
    "stop": None,
    "response_format": {"type": "text"},
    "n": 1,
}
SYSTEM_ROLES = ("system", "developer")


class Failure(Exception):
    """A request that gets no answer, and the response that says why."""

    def __init__(self, status: int, kind: str, message: str, *, code: str = "", field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.body: Body = {
            "error": {"message": message, "type": kind, "code": code or None, "param": field or None}
        }
        self.headers: dict[str, str] = {}
        if kind in FINAL:
            self.headers["x-should-retry"] = "false"


def bad_request(message: str, field: str = "", *, code: str = "") -> Failure:
    """The failure of a malformed request. `message` is one sentence; `field` is the field that is wrong."""
    return Failure(400, "invalid_request_error", message, code=code, field=field)


def failure_of(error: BaseException) -> Failure:
    """The response to an error: what the client did wrong, which limit was reached, or what failed."""
    message = without_keys(str(error))
    match error:
        case Failure():
            return error
        case QuestionTooLong():
            return bad_request(message, "messages", code="context_length_exceeded")
        case LimitReached(limit="seconds"):
            return Failure(504, "time_limit", message)
        case LimitReached() | OutOfBudget():
            return Failure(402, "budget_exhausted", message)
        case AgentUnusable():
            return Failure(500, "agent_unusable", message)
        case EnvError() | Resumable():
            return Failure(502, "environment_error", message)
        case UsageError():
            return Failure(502, "environment_unusable", message)
    return Failure(500, "internal_error", "an internal error; the server's log has the traceback")


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for. If temperature or seed is None, the pair's own is used."""

    model: str
    question: str
    stream: bool
    temperature: float | None
    seed: int | None


def read_request(content: bytes) -> ChatRequest:
    """Read the body of a request. Raises Failure. Fields that we do not know are ignored."""
    given = json_object(content)
    if not given:
        raise bad_request("the body is not a JSON object with fields")
    if given.get("tool_choice") == "none":  # The client lists its tools, and forbids their use.
        given.pop("tools", None)
    for name, usual in UNSUPPORTED.items():
        if given.get(name) and given[name] != usual:
            raise bad_request(f"`{name}` is not supported: the pair answers one question with text", name)
    temperature = given.get("temperature")
    if temperature is not None and not (is_finite_number(temperature) and temperature >= 0):
        raise bad_request("`temperature` must be a number, and at least 0", "temperature")
    return ChatRequest(
        model=_field(given, "model", str) or "",
        question=_question(_field(given, "messages", list) or []),
        stream=_field(given, "stream", bool) or False,
        temperature=temperature,
        seed=_field(given, "seed", int),
    )


def _field(given: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """The value of a field; None if it is absent or null. Raises Failure if it has another type."""
    value = given.get(name)
    if value is None or type(value) is kind:  # isinstance() would take true for an int.
        return value
    raise bad_request(f"`{name}` must be of type {kind.__name__}", name)


def _question(messages: list[Any]) -> str:
    """The user's last message. System messages and earlier turns stand before it, as text."""
    try:
        sent = [(message["role"], _text(message.get("content"))) for message in messages]
    except (TypeError, KeyError, AttributeError):
        raise bad_request("each of `messages` must have a role and content of text", "messages") from None
    question = sent[-1][1].strip() if sent and sent[-1][0] == "user" else ""
    if not question:
        raise bad_request("the last of `messages` must be a question of the user", "messages")
    before = sent[:-1]
    system = [text for role, text in before if role in SYSTEM_ROLES and text.strip()]
    earlier = [f"{role}: {text}" for role, text in before if role not in SYSTEM_ROLES]
    if earlier:
        question = "\n".join(["Earlier messages:", *earlier, "", f"The question now: {question}"])
    return "\n\n".join([*system, question])


def _text(content: Any) -> str:
    """The text of a message's content: a string, null, or a list of parts with text.

    Raises TypeError or KeyError for anything else.
    """
    texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    return "\n".join(texts)


def completion(head: Body, game: Trajectory) -> Body:
    """A response that is not streamed. `head` has its id, its time and its model."""
    message = {"role": "assistant", **answer_of(game)}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(game)}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage_of(game)}


def chunk(head: Body, delta: Mapping[str, object], finish: str | None = None) -> Body:
    """A part of a response that is streamed."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def last_chunk(head: Body, game: Trajectory) -> Body:
    """The last part of a stream: the answer, and what it took."""
    return {**chunk(head, answer_of(game), finish_reason(game)), "usage": usage_of(game)}


def dialogue_text(piece: Piece) -> str:
    """The text that a piece adds to `reasoning_content`. Blocks have labels; the answer is left out."""
    if piece.kind == "answer":
        return ""
    return f"\n{LABELS[piece.kind].capitalize()}: {piece.text}" if piece.begins else piece.text


def answer_of(game: Trajectory) -> Body:
    """The text of the answer, or why there is none."""
    refusal = None if game.answer is not None else f"The agent ended without an answer ({game.stop})."
    return {"content": game.answer or "", "refusal": refusal}


def finish_reason(game: Trajectory) -> str:
    """OpenAI's word for how a game ended: "length" if it ran out of turns or tokens, else "stop"."""
    return "length" if game.stop in ("max_turns", "max_tokens") else "stop"


def usage_of(game: Trajectory) -> Body:
    """The agent's tokens, each counted once, and in an extra field the calls of the environment."""
    written = sum(game.sampled)
    return {
        "prompt_tokens": len(game.tokens) - written,
        "completion_tokens": written,
        "total_tokens": len(game.tokens),
        "environment": {
            "calls": game.spent.calls,
            "prompt_tokens": game.spent.tokens_in,
            "completion_tokens": game.spent.tokens_out,
            "usd": game.spent.usd,
        },
    }
