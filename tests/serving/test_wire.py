"""Requests and responses field by field, without a server."""

import json

import pytest

from prompt_r1.api.asking import Answer, Piece, raise_for_error
from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import EnvError, FatalEnvError, QuestionTooLong
from prompt_r1.playing import LimitReached, Limits
from prompt_r1.serving.failures import BadRequest, failure_of
from prompt_r1.serving.request import AskedRequest, read_request
from prompt_r1.serving.response import ChatForm, DialogueText, event
from prompt_r1.types import Action, Question, Trajectory, Turn

ASKED = {"model": "pair", "messages": [{"role": "user", "content": " Who? "}]}


def read(**fields: object) -> AskedRequest:
    return read_request(json.dumps({**ASKED, **fields}).encode())


def question(**fields: object) -> str:
    return read(**fields).question(system="environment", history="join")[1]


def test_a_request_without_options_is_neither_streamed_nor_seeded():
    found = read()
    assert (found.model, question(), found.seed, found.temperature) == ("pair", "Who?", 0, None)
    assert (found.stream, found.stream_options.include_usage, found.include_reasoning) == (False,) * 3
    assert found.lower(Limits()) == Limits() == Limits(None, None, None, None)
    asked = read(
        stream=True, stream_options={"include_usage": True}, include_reasoning=True, seed=7, temperature=0
    )
    assert (asked.stream, asked.stream_options.include_usage, asked.include_reasoning) == (True,) * 3
    assert (asked.seed, asked.temperature) == (7, 0.0)
    assert read(seed="\ud800").seed == "?"  # half a character has no UTF-8
    assert read(stream_options=None).stream is False
    with pytest.raises(BadRequest, match="`stream_options`: Input should be an object"):
        read(stream_options="text")


def fields_of(turns: float, calls: float, usd: float, seconds: float) -> dict[str, float]:
    """The fields of a request with these limits."""
    return {"max_turns": turns, "max_calls": calls, "max_usd": usd, "max_seconds": seconds}


OURS = Limits(5, 6, 0.5, 7.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "limits"),
    [
        (Limits(), {}, Limits()),
        (OURS, {}, OURS),
        (Limits(), fields_of(3, 2, 0.1, 9), Limits(3, 2, 0.1, 9.0)),
        (OURS, fields_of(3, 2, 0.1, 2), Limits(3, 2, 0.1, 2.0)),
        (OURS, fields_of(9, 9, 9, 9), OURS),
        (OURS, fields_of(0, 0, 0, 0), Limits(0, 0, 0.0, 0.0)),
        (Limits(calls=0), {"max_calls": 3}, Limits(calls=0)),
        (Limits(), {"max_tokens": 0, "max_completion_tokens": 9}, Limits()),
    ],
)
def test_a_request_may_lower_the_limits_of_the_server_and_not_raise_them(ours, theirs, limits):
    assert read(**theirs).lower(ours) == limits


def message(content: object, *, role: str = "user") -> dict[str, object]:
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("fields", "field", "sentence"),
    [
        ({"stop": [""]}, "stop.0", "`stop.0`: String should have at least 1 character"),
        ({"tools": [{}]}, "tools", "`tools` is not supported: the agent's only tool is its environment"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the server keeps no conversations"),
        ({"stream": "false"}, "stream", "`stream`: Input should be a valid boolean"),
        ({"include_reasoning": 1}, "include_reasoning", "should be a valid boolean"),
        ({"stream_options": {"include_usage": "no"}}, "stream_options.include_usage", "a valid boolean"),
        ({"audio": {"voice": "x"}}, "audio", "`audio` is not supported"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format.type",
            "should be 'text' or 'json_schema'",
        ),
        ({"logprobs": True}, "logprobs", "is not supported"),
        ({"n": 0}, "n", "`n`: Input should be 1"),
        ({"model": None}, "model", "`model`: Field required"),
        ({"temperature": True}, "temperature", "`temperature`: Input should be a valid number"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"max_usd": float("inf")}, "max_usd", "should be a finite number"),
        ({"max_usd": 10**400}, "max_usd", "should be a finite number"),
        ({"max_seconds": "3"}, "max_seconds", "should be a valid number"),
        ({"max_turns": 1.5}, "max_turns", "should be a valid integer"),
        ({"max_call": 3}, "max_call", "no limit 'max_call': there are max_calls, max_seconds"),
        ({"messages": [{"role": "x" * 10_000}]}, "messages.0.role", "should be 'system', 'developer'"),
        ({"messages": 3}, "messages", "should be a valid array"),
        ({"messages": []}, "messages", "should have at least 1 item"),
        (message("Hi", role="assistant"), "messages", "`messages` must be a question of the user"),
        ({"messages": ["Who?"]}, "messages.0", "should be an object"),
        (message("  "), "messages", "`messages` must be a question of the user"),
        (message(3), "messages.0.content", "should be a valid array"),
        (message([{"type": "text"}]), "messages.0.content.0.text", "Field required"),
        (message([{"type": "image_url"}]), "messages.0.content.0.type", "should be 'text'"),
        (message(["Who?"]), "messages.0.content.0", "should be an object"),
    ],
)
def test_a_wrong_field_is_named(fields, field, sentence):
    with pytest.raises(BadRequest) as refused:
        read(**fields).question(system="environment", history="join")
    assert refused.value.body["error"]["param"] == field and sentence in str(refused.value)


def test_fields_that_say_what_is_so_anyway_are_accepted():
    said = {"tools": [], "functions": None, "logprobs": False, "response_format": {"type": "text"}, "n": 1}
    assert question(**said, modalities=["text"], user="me") == "Who?"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [(b"[]", "not a JSON object"), (b"{", "the body is not JSON: "), (b"[" * 100_000, "not JSON")],
)
def test_a_body_that_is_no_json_object_is_refused(body, sentence):
    with pytest.raises(BadRequest, match=sentence):
        read_request(body)


def test_only_earlier_messages_of_user_and_assistant_are_repeated():
    roles = ("system", "user", "developer", "assistant")
    messages = [{"role": role, "content": f"by {role}"} for role in roles]
    messages += [{"role": "assistant", "content": None}, {"role": "user", "content": "And now?"}]
    assert question(messages=messages) == (
        "Earlier messages:\nuser: by user\nassistant: by assistant\nassistant: \n\nThe question now: And now?"
    )
    assert question(messages=[messages[0], messages[-1]]) == "And now?"


TURNS = (
    Turn("no tags", Action(None, None, None, clean=False), reply=None),
    Turn("t1", Action("I think", "Who?", None, clean=True), reply="Bob."),
    Turn("t2", Action("", None, "Anna", clean=True), reply=None),
)


def answer(**changes: object) -> Answer:
    game = Trajectory(Question("q", "d", "Who?", ()))
    values = {"question": "Who?", "text": "Anna", "stop": "answered", "turns": TURNS, "trajectory": game}
    values |= {"calls": 1, "tokens_in": 50, "tokens_out": 4, "usd": 0.5, "seconds": 1.23456}
    return Answer(**{**values, "tokens_read": 70, "tokens_written": 9, **changes})


def test_a_completion_has_the_answer_its_usage_and_the_dialogue_if_wanted():
    for dialogue in (None, "Agent thinks: I think"):
        body = ChatForm("id", "pair", 7).whole(answer(), dialogue)
        message = {"role": "assistant", "content": "Anna", "refusal": None}
        if dialogue:
            message["reasoning_content"] = dialogue
        assert body == {
            **{"id": "chatcmpl-id", "created": 7, "model": "pair", "object": "chat.completion"},
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
            "usage": {
                **{"prompt_tokens": 70, "completion_tokens": 9, "total_tokens": 79},
                "environment": {"calls": 1, "prompt_tokens": 50, "completion_tokens": 4, "usd": 0.5},
            },
            "prompt_r1": {"stop": "answered", "turns": 3, "seconds": 1.235},
        }


@pytest.mark.parametrize(
    ("stop", "reason"),
    [("max_turns", "length"), ("max_tokens", "length"), ("malformed", "stop"), ("answered", "stop")],
)
def test_a_game_without_an_answer_is_a_refusal_with_its_reason(stop, reason):
    body = ChatForm("id", "pair", 7).whole(answer(text=None, stop=stop), None)
    [choice] = body["choices"]
    assert choice["finish_reason"] == reason and choice["message"]["content"] == ""
    assert choice["message"]["refusal"] == f"The agent ended without an answer ({stop})."


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_ends_with_the_answer_its_reason_and_the_usage_if_wanted(include_usage):
    said, end, *rest = ChatForm("id", "pair", 7, include_usage=include_usage).last(answer())
    head = {"id": "chatcmpl-id", "created": 7, "model": "pair", "object": "chat.completion.chunk"}
    delta = {"content": "Anna", "refusal": None}
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    assert said == {**head, "choices": [choice]}
    assert end["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None}]
    assert end["prompt_r1"]["turns"] == 3 and len(rest) == include_usage
    assert all(chunk["choices"] == [] and chunk["usage"]["total_tokens"] == 79 for chunk in rest)
    assert event(head) == f"data: {json.dumps(head)}\n\n".encode()


def test_the_pieces_of_a_block_follow_one_label_and_each_reply_has_its_own():
    text = DialogueText()
    pieces = [Piece("think", "a"), Piece("think", "b"), Piece("answer", "x"), Piece("think", "c")]
    pieces += [Piece("reply", "r"), Piece("reply", "s"), Piece("prompt", "p")]
    assert [text.add(piece) for piece in pieces] == [
        *("Agent thinks: a", "b", "", "c"),
        *("\nEnvironment: r", "\nEnvironment: s", "\nAgent asks: p"),
    ]


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (BadRequest("bad", "n"), 400, "invalid_request_error", None),
        (QuestionTooLong("long"), 400, "invalid_request_error", None),
        (LimitReached("seconds", "late"), 504, "time_limit", "false"),
        (LimitReached("usd", "dear"), 402, "budget_exhausted", "false"),
        (OutOfBudget("spent"), 402, "budget_exhausted", "false"),
        (EnvError("down"), 502, "environment_error", None),
        (FatalEnvError("no key"), 502, "environment_unusable", "false"),
        (ValueError("secret"), 500, "internal_error", "false"),
    ],
)
def test_each_error_has_its_status_and_says_whether_to_come_again(error, status, kind, retry):
    failure = failure_of(error)
    assert (failure.status, failure.type) == (status, kind)
    assert (failure.headers or {}).get("x-should-retry") == retry
    said = failure.body["error"]
    assert (said["message"] == str(error)) == (status != 500) and "secret" not in said["message"]
    assert said["param"] == {"bad": "n", "long": "messages"}.get(str(error))
    assert said["code"] == ("context_length_exceeded" if str(error) == "long" else None)


def test_an_answer_is_its_text_and_a_failed_environment_an_error():
    assert str(answer()) == "Anna" and str(answer(text=None)) == "" and answer().score("anna").em == 1
    assert raise_for_error(answer()) == answer()
    for error, sentence in (("down", "^down$"), ("", "^the environment failed$")):
        with pytest.raises(EnvError, match=sentence):
            raise_for_error(answer(stop="env_error", error=error))
