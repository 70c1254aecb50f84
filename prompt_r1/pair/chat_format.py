"""OpenAI's chat completions, without a server: read a request, and write a game or an error.

read_request        the body of a request → what it asks for
completion, chunk   a game → a response, or a part of a stream
failure_of          an error → its status and its body
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prompt_r1.chat_template import encodable
from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import AgentUnusable, EnvError, LimitReached, QuestionTooLong, Resumable, UsageError
from prompt_r1.pair.dialogue import LABELS, Piece
from prompt_r1.programs.reading import is_finite_number, json_object
from prompt_r1.programs.text import without_keys
from prompt_r1.types import Trajectory

Body = dict[str, object]


class Failure(Exception):
    """A request that gets no answer, and the response that says why."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.body: Body = {"error": {"message": message, "type": kind}}
        # OpenAI's client repeats a request after a status from 500 on, unless this header forbids it. Only a
        # call of the environment that failed may succeed the next time.
        self.headers = {} if kind == "environment_error" else {"x-should-retry": "false"}


def bad_request(message: str) -> Failure:
    """The failure of a malformed request."""
    return Failure(400, "invalid_request_error", message)


def failure_of(error: Exception) -> Failure:
    """The failure that says what the client did wrong, which limit was reached, or what failed."""
    message = encodable(without_keys(str(error)))  # A user's object may raise any text.
    match error:
        case QuestionTooLong():
            return Failure(400, "context_length_exceeded", message)
        case TimeoutError():
            return Failure(504, "time_limit", "no answer within the server's limit of seconds")
        case LimitReached() | OutOfBudget():
            return Failure(402, "budget_exhausted", message)
        case AgentUnusable() | UsageError():
            return Failure(500, "unusable", message)
        case EnvError() | Resumable():
            return Failure(502, "environment_error", message)
    return Failure(500, "internal_error", "an internal error; the server's log has the traceback")


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for. If temperature or seed is None, the pair's own is used."""

    question: str
    stream: bool
    temperature: float | None
    seed: int | None


def read_request(content: bytes) -> ChatRequest:
    """Read the body of a request. Raises Failure. All other fields are ignored."""
    given = json_object(content)
    temperature = given.get("temperature")
    if temperature is not None and not (is_finite_number(temperature) and temperature >= 0):
        raise bad_request("`temperature` must be a number, and at least 0")
    seed = given.get("seed")
    if seed is not None and type(seed) is not int:
        raise bad_request("`seed` must be a whole number")
    return ChatRequest(
        question=_question(given.get("messages")),
        stream=bool(given.get("stream")),
        temperature=temperature,
        seed=seed,
    )


def _question(messages: Any) -> str:
    """The user's last message. All messages before it, such as a system message, stand before it as text."""
    try:
        *earlier, last = messages
        question = _text(last) if last["role"] == "user" else ""
        lines = [f"{message['role']}: {_text(message)}" for message in earlier]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise bad_request("`messages` must be a list of messages with `role` and `content`, a text") from None
    if not question:
        raise bad_request("the last of `messages` must be a question of the user")
    if not earlier:
        return question
    return "\n".join(["Earlier messages:", *lines, "", f"The question now: {question}"])


def _text(message: Any) -> str:
    """The text of a message. Its content is a text, a list of parts with text, or null beside tool calls."""
    content = message.get("content") or ""
    texts = [part["text"] for part in content] if isinstance(content, list) else [content]
    return "\n".join(texts).strip()


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


def dialogue_delta(piece: Piece) -> Body:
    """What a piece adds to a stream: text of `reasoning_content`. The first piece of a block has a label.

    The extra field `kind` is for the page (chat.html): it names the kind of a block that begins here.
    """
    if not piece.begins:
        return {"reasoning_content": piece.text}
    label = LABELS[piece.kind].capitalize()
    return {"reasoning_content": f"\n{label}: {piece.text}", "kind": piece.kind}


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
