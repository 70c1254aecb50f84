"""Bodies of responses in OpenAI's form. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from prompt_r1.api.asking import Answer, Kind, Piece
from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import EnvError, FatalEnvError, QuestionTooLong, Resumable
from prompt_r1.playing import LimitReached
from prompt_r1.serving.chat_request import BadRequest

LABELS: dict[Kind, str] = {
    "think": "Agent thinks", "prompt": "Agent asks", "reply": "Environment", "other": "Agent writes"
}  # fmt: skip
END_OF_STREAM = b"data: [DONE]\n\n"
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's client repeats other failed requests by itself


@dataclass(frozen=True)
class Envelope:
    """What all parts of a response have in common."""

    id: str
    model: str
    created: int  # seconds since the epoch
    system_to: str = ""  # who got the system messages of the request; "": it had none

    def completion(self, answer: Answer, dialogue: str | None) -> dict[str, object]:
        """The body of a response that is not streamed."""
        message = _message(answer)
        if dialogue is not None:
            message["reasoning_content"] = dialogue
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(answer), "logprobs": None}
        body = {"object": "chat.completion", "choices": [choice], "usage": usage(answer)}
        return self._with(body | {"prompt_r1": self._details(answer)})

    def chunk(self, delta: Mapping[str, object], *, finish: str | None = None) -> dict[str, object]:
        """A part of a stream."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return self._with({"object": "chat.completion.chunk", "choices": [choice]})

    def last_chunks(self, answer: Answer, *, include_usage: bool) -> list[dict[str, object]]:
        """The answer, how it ended, and the usage if wanted."""
        message = _message(answer)
        del message["role"]
        end = self.chunk({}, finish=finish_reason(answer)) | {"prompt_r1": self._details(answer)}
        chunks = [self.chunk(message), end]
        if include_usage:
            body = {"object": "chat.completion.chunk", "choices": [], "usage": usage(answer)}
            chunks.append(self._with(body))
        return chunks

    def _details(self, answer: Answer) -> dict[str, object]:
        details = {"stop": answer.stop, "turns": len(answer.turns), "seconds": round(answer.seconds, 3)}
        return details | ({"system_to": self.system_to} if self.system_to else {})

    def _with(self, body: Mapping[str, object]) -> dict[str, object]:
        return {"id": self.id, "created": self.created, "model": self.model, **body}


class DialogueText:
    """The dialogue as one text for `reasoning_content`: blocks with labels. The answer is left out."""

    def __init__(self) -> None:
        self._last: Kind | None = None

    def add(self, piece: Piece) -> str:
        """The text that a piece adds."""
        if piece.kind == "answer":
            return ""
        label = "" if piece.kind == self._last and piece.kind != "reply" else f"{LABELS[piece.kind]}: "
        gap = "\n" if label and self._last else ""
        self._last = piece.kind
        return gap + label + piece.text


def usage(answer: Answer) -> dict[str, object]:
    """The agent's tokens, and as an extra field what the environment did. Each agent token counts once."""
    return {
        "prompt_tokens": answer.tokens_read,
        "completion_tokens": answer.tokens_written,
        "total_tokens": answer.tokens_read + answer.tokens_written,
        "environment": {
            "calls": answer.calls,
            "prompt_tokens": answer.tokens_in,
            "completion_tokens": answer.tokens_out,
            "usd": answer.usd,
        },
    }


def finish_reason(answer: Answer) -> str:
    """OpenAI's word for how a game ended: length if it ran out of turns or tokens."""
    return "length" if answer.stop in ("max_turns", "max_tokens") else "stop"


def _message(answer: Answer) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": answer.text or "", "refusal": None}
    if answer.text is None:
        message["refusal"] = f"The agent ended without an answer ({answer.stop})."
    return message


@dataclass(frozen=True)
class Failure:
    """An error as a response: its status, body and headers."""

    status: int
    type: str
    message: str
    code: str | None = None
    field: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.type, "code": self.code, "param": self.field}
        return {"error": error}


def failure_of(error: BaseException) -> Failure:
    """The response to an error: what the client did wrong, which limit was reached, or who failed."""
    message = str(error)
    match error:
        case BadRequest():
            return Failure(400, "invalid_request_error", message, field=error.field or None)
        case QuestionTooLong():
            return Failure(400, "invalid_request_error", message, "context_length_exceeded", "messages")
        case LimitReached(limit="seconds"):
            return Failure(504, "time_limit", message, headers=NO_RETRY)
        case LimitReached() | OutOfBudget():
            return Failure(402, "budget_exhausted", message, headers=NO_RETRY)
        case EnvError():
            return Failure(502, "environment_error", message)
        case FatalEnvError():
            return Failure(502, "environment_unusable", message, headers=NO_RETRY)
        case Resumable():  # the agent's endpoint does not answer
            return Failure(503, "agent_unavailable", message, headers={"Retry-After": "5"})
    return Failure(
        500, "internal_error", "an internal error; the server's log has the traceback", headers=NO_RETRY
    )


def event(body: Mapping[str, object]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n".encode()
