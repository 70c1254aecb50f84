"""OpenAI's chat completions: requests as questions, games as responses, errors as bodies."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import EnvError, FatalEnvError, QuestionTooLong, Resumable
from prompt_r1.pair.dialogue import LABELS, Piece
from prompt_r1.pair.playing import LimitReached
from prompt_r1.programs.files import is_finite_number, json_object
from prompt_r1.types import Trajectory

logger = logging.getLogger(__name__)

Body = dict[str, object]
T = TypeVar("T")
# Types of errors that OpenAI's client, which repeats failed requests by itself, must not repeat.
FINAL = ("time_limit", "budget_exhausted", "environment_unusable", "internal_error")
# Fields that would change what is answered, except with this value. Others that we do not know are ignored.
UNSUPPORTED = {
    **dict.fromkeys(("tools", "functions", "logprobs", "audio", "stop")),
    "response_format": {"type": "text"},
    "n": 1,
}
RULING = ("system", "developer")


class Failure(Exception):
    """A request that gets no answer, and the response that says so."""

    def __init__(self, status: int, type: str, message: str, *, code: str = "", field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"x-should-retry": "false"} if type in FINAL else {}
        error = {"message": message, "type": type, "code": code or None, "param": field or None}
        self.body: Body = {"error": error}


def bad_request(message: str, field: str = "", *, code: str = "") -> Failure:
    """A request that cannot be answered: one sentence, and the field that is wrong."""
    return Failure(400, "invalid_request_error", message, code=code, field=field)


def failure_of(error: BaseException) -> Failure:
    """The response to an error: what the client did wrong, which limit was reached, or who failed."""
    message = str(error)
    match error:
        case Failure():
            return error
        case HTTPException():
            return Failure(error.status_code, "invalid_request_error", error.detail)
        case QuestionTooLong():
            return bad_request(message, "messages", code="context_length_exceeded")
        case LimitReached(limit="seconds"):
            return Failure(504, "time_limit", message)
        case LimitReached() | OutOfBudget():
            return Failure(402, "budget_exhausted", message)
        case EnvError() | Resumable():
            return Failure(502, "environment_error", message)
        case FatalEnvError():
            return Failure(502, "environment_unusable", message)
    logger.error("a request ended with an internal error", exc_info=error)
    return Failure(500, "internal_error", "an internal error; the server's log has the traceback")


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for."""

    model: str
    question: str
    stream: bool
    temperature: float | None  # None: the pair's, as of the seed
    seed: int | None


def read_request(content: bytes) -> ChatRequest:
    """Read the body of a request. Raises Failure."""
    given = json_object(content)
    if not given:
        raise bad_request("the body is not a JSON object with fields")
    for name, usual in UNSUPPORTED.items():
        if given.get(name) and given[name] != usual:
            raise bad_request(f"`{name}` is not supported: the pair answers one question with text", name)
    temperature = given.get("temperature")
    if temperature is not None and not (is_finite_number(temperature) and temperature >= 0):
        raise bad_request("`temperature` must be a number, and at least 0", "temperature")
    return ChatRequest(
        model=_field(given, "model", ""),
        question=_question(_field(given, "messages", [])),
        stream=_field(given, "stream", False),
        temperature=temperature,
        seed=None if given.get("seed") is None else _field(given, "seed", 0),
    )


def _field(given: Mapping[str, Any], name: str, default: T) -> T:
    """A field of the type of its default, which stands for null too. Raises Failure."""
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not type(default):
        raise bad_request(f"`{name}` must be of type {type(default).__name__}", name)
    return value


def _question(messages: list[Any]) -> str:
    """The user's last message. System messages and earlier turns stand before it, as text."""
    try:
        sent = [(message["role"], _text(message.get("content") or "")) for message in messages]
    except (TypeError, KeyError, AttributeError):
        raise bad_request("each of `messages` must have a role and content of text", "messages") from None
    role, question = sent[-1] if sent else ("", "")
    if role != "user" or not question.strip():
        raise bad_request("the last of `messages` must be a question of the user", "messages")
    question = question.strip()
    rules = [text for role, text in sent[:-1] if role in RULING and text.strip()]
    earlier = [f"{role}: {text}" for role, text in sent[:-1] if role not in RULING]
    if earlier:
        question = "\n".join(["Earlier messages:", *earlier, "", f"The question now: {question}"])
    return "\n\n".join([*rules, question])


def _text(content: Any) -> str:
    """The text of a message, which may have parts."""
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content)


def dialogue_text(piece: Piece) -> str:
    """What a piece adds to `reasoning_content`: blocks with labels. The answer is left out."""
    if piece.kind == "answer":
        return ""
    return f"\n{LABELS[piece.kind].capitalize()}: {piece.text}" if piece.begins else piece.text


def completion(head: Body, game: Trajectory) -> Body:
    """A response that is not streamed. `head` has its id, its time and its model."""
    choice = {"index": 0, "message": {"role": "assistant", **said(game)}, "finish_reason": ending(game)}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage(game)}


def chunk(head: Body, delta: Mapping[str, object], finish: str | None = None) -> Body:
    """A part of a response that is streamed."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def said(game: Trajectory) -> Body:
    """The text of the answer, or why there is none."""
    refusal = None if game.answer is not None else f"The agent ended without an answer ({game.stop})."
    return {"content": game.answer or "", "refusal": refusal}


def ending(game: Trajectory) -> str:
    """OpenAI's word for how a game ended: length if it ran out of turns or tokens."""
    return "length" if game.stop in ("max_turns", "max_tokens") else "stop"


def usage(game: Trajectory) -> Body:
    """The agent's tokens, and as an extra field what the environment did. Each agent token counts once."""
    written, spent = sum(game.sampled), game.spent
    tokens = {"prompt_tokens": spent.tokens_in, "completion_tokens": spent.tokens_out}
    return {
        "prompt_tokens": len(game.tokens) - written,
        "completion_tokens": written,
        "total_tokens": len(game.tokens),
        "environment": {"calls": spent.calls, **tokens, "usd": spent.usd},
    }
