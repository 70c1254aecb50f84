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
from prompt_r1.pair.chat_format import ChatRequest, Failure, failure_of, finish_reason, read_request
from prompt_r1.types import Question, Trajectory

ASKED = {"model": "pair", "messages": [{"role": "user", "content": " Who? "}]}


def read(**fields: object) -> ChatRequest:
    return read_request(json.dumps({**ASKED, **fields}).encode())


def test_a_request_without_options_is_neither_streamed_nor_seeded():
    assert read() == read(stream=None, seed=None) == ChatRequest("Who?", False, None, None)
    assert read(stream=True, temperature=0, seed=7) == ChatRequest("Who?", True, 0, 7)


def test_other_fields_are_ignored():
    """The program llm sends `stream_options`; other clients send what their users give."""
    given = {"stream_options": {"include_usage": True}, "tools": [{}], "n": 2, "max_tokens": 9, "stop": "x"}
    assert read(**given) == read()


def message(content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": True}, "`temperature` must be a number"),
        ({"temperature": "0.7"}, "`temperature` must be a number"),
        ({"temperature": -0.1}, "at least 0"),
        ({"temperature": float("inf")}, "`temperature` must be a number"),
        *[({"seed": seed}, "`seed` must be a whole number") for seed in (True, "7", 0.5, [], {"a": 1})],
        *[
            ({"messages": messages}, "`messages` must be a list")
            for messages in (None, 3, "Who?", {}, [], ["Who?"])
        ],
        ({"messages": [{"content": "Hi"}, {"role": "user", "content": "Who?"}]}, "`messages` must be a list"),
        *[
            (message(content), "`messages` must be a list")
            for content in (7, [{"type": "text"}], [{"type": "text", "text": None}])
        ],
        *[(message(content), "the last of `messages` must be a question") for content in ("  ", None, [])],
        ({"messages": [{"role": "assistant", "content": "Who?"}]}, "must be a question of the user"),
    ],
)
def test_a_wrong_field_is_named(fields, sentence):
    """Bugs: the agent played the question "None" for a part whose text is null, and any JSON was a seed."""
    with pytest.raises(Failure, match=sentence) as refused:
        read(**fields)
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(Failure, match="`messages` must be a list"):
        read_request(body)


def test_earlier_messages_stand_before_the_question():
    roles = ("system", "user", "assistant")
    messages = [{"role": role, "content": f" by {role} "} for role in roles]
    assert read(messages=[*messages, {"role": "user", "content": "And now?"}]).question == (
        "Earlier messages:\nsystem: by system\nuser: by user\nassistant: by assistant\n"
        "\nThe question now: And now?"
    )


def test_contents_may_be_lists_of_parts_and_null_beside_tool_calls():
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "is it?"}]
    assert read(**message(parts)).question == "Who\nis it?"
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "user", "content": "Who?"},
    ]
    assert read(messages=messages).question.startswith("Earlier messages:\nassistant: \n")


@pytest.mark.parametrize(
    ("error", "status", "kind", "repeated"),
    [
        (QuestionTooLong("long"), 400, "context_length_exceeded", False),
        (TimeoutError(), 504, "time_limit", False),
        (LimitReached("dear"), 402, "budget_exhausted", False),
        (OutOfBudget("spent"), 402, "budget_exhausted", False),
        (EnvError("down"), 502, "environment_error", True),
        (Resumable("too many failed"), 502, "environment_error", True),
        (AgentUnusable("NaN"), 500, "unusable", False),
        (FatalEnvError("no key"), 500, "unusable", False),
        (UsageError("its own ask raised"), 500, "unusable", False),
        (ValueError("secret"), 500, "internal_error", False),
    ],
)
def test_each_error_has_its_status_and_says_whether_to_come_again(error, status, kind, repeated):
    failure = failure_of(error)
    said = failure.body["error"]
    assert (failure.status, said["type"]) == (status, kind)
    assert failure.headers == ({} if repeated else {"x-should-retry": "false"})
    has_own_message = kind not in ("internal_error", "time_limit")
    assert (said["message"] == str(error)) == has_own_message and "secret" not in said["message"]


@pytest.mark.parametrize(
    ("stop", "finish"),
    [("answered", "stop"), ("malformed", "stop"), ("max_turns", "length"), ("max_tokens", "length")],
)
def test_a_game_that_ran_out_of_turns_or_tokens_finishes_by_length(stop, finish):
    assert finish_reason(Trajectory(Question("q", "asked", "Who?", ()), stop=stop)) == finish
