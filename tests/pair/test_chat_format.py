"""Requests and errors field by field, without a server."""

import json

import pytest

from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import (
    AgentUnusable,
    EnvError,
    FatalEnvError,
    LimitReached,
    QuestionTooLong,
    Resumable,
    UsageError,
)
from prompt_r1.pair.chat_format import (
    ChatRequest,
    Failure,
    bad_request,
    failure_of,
    finish_reason,
    read_request,
)
from prompt_r1.types import Question, Trajectory

ASKED = {"model": "pair", "messages": [{"role": "user", "content": " Who? "}]}


def read(**fields: object) -> ChatRequest:
    return read_request(json.dumps({**ASKED, **fields}).encode())


def test_a_request_without_options_is_neither_streamed_nor_seeded():
    plain = ChatRequest("pair", "Who?", False, None, None)
    assert read() == read(stream=None, stream_options=None, tools=[], seed=None, user="me") == plain
    assert read(tools=[{"type": "function"}], tool_choice="none") == plain
    assert read(response_format={"type": "text"}, n=1, logprobs=False) == plain
    assert read(stream=True, temperature=0, seed=7) == ChatRequest("pair", "Who?", True, 0, 7)


def message(content: object, *, role: str = "user") -> dict[str, object]:
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("fields", "field", "sentence"),
    [
        ({"tools": [{}]}, "tools", "`tools` is not supported"),
        ({"tools": [{}], "tool_choice": "auto"}, "tools", "`tools` is not supported"),
        ({"functions": [{}]}, "functions", "`functions` is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
        ({"stop": "x"}, "stop", "is not supported"),
        ({"n": 2}, "n", "is not supported"),
        ({"logprobs": True}, "logprobs", "is not supported"),
        ({"stream": "false"}, "stream", "`stream` must be of type bool"),
        ({"model": 3}, "model", "must be of type str"),
        ({"seed": True}, "seed", "must be of type int"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": -0.1}, "temperature", "at least 0"),
        ({"temperature": float("inf")}, "temperature", "must be a number"),
        ({"messages": 3}, "messages", "must be of type list"),
        ({"messages": []}, "messages", "must be a question of the user"),
        ({"messages": ["Who?"]}, "messages", "must have a role and content of text"),
        ({"messages": [{"content": "Who?"}]}, "messages", "must have a role and content of text"),
        (message("Hi", role="assistant"), "messages", "must be a question of the user"),
        (message("  "), "messages", "must be a question of the user"),
        (message([{"type": "image_url"}]), "messages", "must have a role and content of text"),
        (message([{"type": "text", "text": None}]), "messages", "must have a role and content of text"),
        (message(7), "messages", "must have a role and content of text"),
    ],
)
def test_a_wrong_field_is_named(fields, field, sentence):
    """A bug: the agent played the question "None" for a part whose text is null."""
    with pytest.raises(Failure, match=sentence) as refused:
        read(**fields)
    assert refused.value.status == 400 and refused.value.body["error"]["param"] == field


@pytest.mark.parametrize("body", [b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(Failure, match="body is not a JSON object"):
        read_request(body)


def test_only_system_messages_with_text_and_earlier_turns_stand_before_the_question():
    roles = ("system", "user", "developer", "assistant")
    messages = [{"role": role, "content": f"by {role}"} for role in roles]
    messages += [{"role": "assistant", "content": None}, {"role": "user", "content": "And now?"}]
    assert read(messages=messages).question == (
        "by system\n\nby developer\n\nEarlier messages:\nuser: by user\nassistant: by assistant\n"
        "assistant: \n\nThe question now: And now?"
    )
    assert read(messages=[{"role": "system", "content": " "}, messages[-1]]).question == "And now?"
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "is it?"}]
    assert read(**message(parts)).question == "Who\nis it?"


@pytest.mark.parametrize(
    ("error", "status", "kind", "repeated"),
    [
        (bad_request("bad", "n"), 400, "invalid_request_error", True),
        (QuestionTooLong("long"), 400, "invalid_request_error", True),
        (LimitReached("seconds", "late"), 504, "time_limit", False),
        (LimitReached("usd", "dear"), 402, "budget_exhausted", False),
        (OutOfBudget("spent"), 402, "budget_exhausted", False),
        (EnvError("down"), 502, "environment_error", True),
        (Resumable("too many failed"), 502, "environment_error", True),
        (AgentUnusable("NaN"), 500, "agent_unusable", False),
        (FatalEnvError("no key"), 502, "environment_unusable", False),
        (UsageError("its own ask raised"), 502, "environment_unusable", False),
        (ValueError("secret"), 500, "internal_error", False),
    ],
)
def test_each_error_has_its_status_and_says_whether_to_come_again(error, status, kind, repeated):
    failure = failure_of(error)
    said = failure.body["error"]
    assert (failure.status, said["type"]) == (status, kind)
    assert failure.headers == ({} if repeated else {"x-should-retry": "false"})
    assert (said["message"] == str(error)) == (kind != "internal_error") and "secret" not in said["message"]
    assert said["param"] == {"bad": "n", "long": "messages"}.get(str(error))
    assert said["code"] == ("context_length_exceeded" if str(error) == "long" else None)


@pytest.mark.parametrize(
    ("stop", "finish"),
    [("answered", "stop"), ("malformed", "stop"), ("max_turns", "length"), ("max_tokens", "length")],
)
def test_a_game_that_ran_out_of_turns_or_tokens_finishes_by_length(stop, finish):
    assert finish_reason(Trajectory(Question("q", "asked", "Who?", ()), stop=stop)) == finish
