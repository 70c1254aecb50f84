"""Bodies of responses in OpenAI's two forms: chat completions and responses. Pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from prompt_r1.api.asking import Answer, Kind, Piece
from prompt_r1.serving.failures import Failure

LABELS: dict[Kind, str] = {
    "think": "Agent thinks", "prompt": "Agent asks", "reply": "Environment", "other": "Agent writes"
}  # fmt: skip
Body = dict[str, object]


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


@dataclass(frozen=True)
class _Form:
    """What all parts of a response have in common."""

    request_id: str
    model: str
    created: int  # seconds since the epoch
    system_to: str = ""  # who got the system messages of the request; "": it had none
    include_usage: bool = False  # in a stream of chat completions
    dialogue: DialogueText = field(default_factory=DialogueText)

    def _details(self, answer: Answer) -> Body:
        details = {"stop": answer.stop, "turns": len(answer.turns), "seconds": round(answer.seconds, 3)}
        return details | ({"system_to": self.system_to} if self.system_to else {})


class ChatForm(_Form):
    """Bodies of /v1/chat/completions."""

    def whole(self, answer: Answer, dialogue: str | None) -> Body:
        """A response that is not streamed."""
        message = {"role": "assistant", **_said(answer)}
        if dialogue is not None:
            message["reasoning_content"] = dialogue
        choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer), "logprobs": None}
        return self._body("chat.completion", [choice], usage=usage(answer), prompt_r1=self._details(answer))

    def first(self) -> Body:
        """The event before the game."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> Body:
        """An event with a part of the dialogue."""
        told = {"kind": piece.kind, "text": piece.text}
        return self._chunk({"reasoning_content": self.dialogue.add(piece), "prompt_r1": told})

    def last(self, answer: Answer) -> Iterator[Body]:
        """The events with the answer, how it ended, and the usage if wanted."""
        yield self._chunk(_said(answer))
        yield self._chunk({}, finish=_finish_reason(answer)) | {"prompt_r1": self._details(answer)}
        if self.include_usage:
            yield self._body("chat.completion.chunk", [], usage=usage(answer))

    def failed(self, failure: Failure) -> Body:
        """The event in place of an answer."""
        return failure.body

    def _chunk(self, delta: Mapping[str, object], *, finish: str | None = None) -> Body:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return self._body("chat.completion.chunk", [choice])

    def _body(self, kind: str, choices: list[Body], **more: object) -> Body:
        head = {"id": f"chatcmpl-{self.request_id}", "created": self.created, "model": self.model}
        return {**head, "object": kind, "choices": choices, **more}


@dataclass(frozen=True)
class ResponsesForm(_Form):
    """Bodies of /v1/responses."""

    numbers: Iterator[int] = field(default_factory=count)  # of the events of a stream

    def whole(self, answer: Answer, dialogue: str | None) -> Body:
        """A response that is not streamed."""
        details = self._details(answer) | ({} if dialogue is None else {"dialogue": dialogue})
        tokens = {
            "input_tokens": answer.tokens_read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.tokens_written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.tokens_read + answer.tokens_written,
            "environment": usage(answer)["environment"],
        }
        cut = {"reason": "max_output_tokens"} if _finish_reason(answer) == "length" else None
        status = "incomplete" if cut else "completed"
        output = [self._message([_part(answer)], status)]
        return self._body(status, output, incomplete_details=cut, usage=tokens, prompt_r1=details)

    def first(self) -> Body:
        """The event before the game."""
        return self._event("response.created", response=self._body("in_progress", []))

    def piece(self, piece: Piece) -> Body:
        """An event with a part of the dialogue, of a type of our own."""
        return self._event("prompt_r1.dialogue", kind=piece.kind, text=piece.text)

    def last(self, answer: Answer) -> Iterator[Body]:
        """The events with the answer: the message, its one part, and the text of it in one piece."""
        part = _part(answer)
        kind = "text" if part["type"] == "output_text" else "refusal"
        name, text = f"response.{part['type']}", part[kind]
        item = {"output_index": 0}
        place = {**item, "item_id": self._message([], "")["id"], "content_index": 0}
        whole = self.whole(answer, None)
        yield self._event("response.output_item.added", **item, item=self._message([], "in_progress"))
        yield self._event("response.content_part.added", **place, part=part | {kind: ""})
        yield self._event(f"{name}.delta", **place, delta=text, logprobs=[])
        yield self._event(f"{name}.done", **place, **{kind: text}, logprobs=[])
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", **item, item=self._message([part], "completed"))
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, failure: Failure) -> Body:
        """The event in place of an answer: flat as documented, and nested for OpenAI's client."""
        return {**failure.error, **self._event("error"), **failure.body}

    def _event(self, type: str, **fields: object) -> Body:
        return {"type": type, "sequence_number": next(self.numbers), **fields}

    def _message(self, content: list[Body], status: str) -> Body:
        head = {"type": "message", "id": f"msg_{self.request_id}", "role": "assistant"}
        return {**head, "status": status, "content": content}

    def _body(self, status: str, output: list[Body], **more: object) -> Body:
        head = {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
        }
        fixed: Body = {"error": None, "tools": [], "tool_choice": "none", "parallel_tool_calls": False}
        return {**head, **fixed, "status": status, "output": output, **more}


def usage(answer: Answer) -> Body:
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


def event(body: Body) -> bytes:
    """A server-sent event, with its type where the body has one."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body)}\n\n".encode()


def _finish_reason(answer: Answer) -> str:
    """OpenAI's word for how a game ended: length if it ran out of turns or tokens."""
    return "length" if answer.stop in ("max_turns", "max_tokens") else "stop"


def _said(answer: Answer) -> Body:
    """The text of the answer, or why there is none."""
    refusal = None if answer.text is not None else f"The agent ended without an answer ({answer.stop})."
    return {"content": answer.text or "", "refusal": refusal}


def _part(answer: Answer) -> Body:
    """The same as a part of the message of a response."""
    said = _said(answer)
    if said["refusal"]:
        return {"type": "refusal", "refusal": said["refusal"]}
    return {"type": "output_text", "text": said["content"], "annotations": [], "logprobs": []}
