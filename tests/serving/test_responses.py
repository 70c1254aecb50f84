"""/v1/responses, and answers as JSON of a schema, asked with OpenAI's own client."""

import asyncio
import json

import openai
import pydantic
import pytest

from prompt_r1.environments.specs import pool_of
from prompt_r1.errors import EnvError
from prompt_r1.playing import Limits
from tests.serving.running import pair_of, serving
from tests.support.echo_agent import paid_pool

MODEL = "prompt-r1"
HELLO = [{"role": "user", "content": "Who is Anna?"}]


@pytest.fixture(scope="module")
def client():
    with serving(pair_of()) as url, openai.OpenAI(base_url=url, api_key="none") as started:
        yield started


# --- /v1/responses --------------------------------------------------------------------------------


def test_openais_client_gets_a_response(client):
    response = client.responses.create(model=MODEL, input="Who is Anna?")
    assert response.output_text == "WHO IS ANNA?" and response.status == "completed"
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.environment["calls"] == 1 and response.prompt_r1["stop"] == "answered"
    assert type(response).model_validate(response.model_dump(), strict=True)


def test_a_response_is_what_a_completion_is(client):
    """Both forms have the same answer, costs and dialogue."""
    extra = {"include_reasoning": True}
    said = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra)
    told = client.responses.create(model=MODEL, input=HELLO, extra_body=extra)
    assert told.output_text == said.choices[0].message.content
    assert told.prompt_r1["dialogue"] == said.choices[0].message.reasoning_content
    assert told.usage.environment == said.usage.environment
    assert (told.usage.input_tokens, told.usage.output_tokens) == (
        said.usage.prompt_tokens,
        said.usage.completion_tokens,
    )


def test_openais_client_streams_a_response(client):
    """The client's own accumulator checks the order of the events and rebuilds the response from them."""
    with client.responses.stream(model=MODEL, input="Who is Anna?") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "WHO IS ANNA?" and final.usage.environment["calls"] == 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


def test_the_dialogue_of_a_response_is_streamed_in_events_of_our_own(client):
    stream = client.responses.create(
        model=MODEL, input="Who is Anna?", stream=True, extra_body={"include_reasoning": True}
    )
    pieces = [event for event in stream if event.type == "prompt_r1.dialogue"]
    assert "".join(piece.text for piece in pieces if piece.kind == "answer") == "WHO IS ANNA?"


def test_the_asynchronous_client_gets_a_response():
    async def ask(url: str) -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            whole = await client.responses.create(model=MODEL, input="Who?")
            stream = await client.responses.create(model=MODEL, input="Who?", stream=True)
            return whole.output_text, "".join([part.delta async for part in stream if "delta" in part.type])

    with serving(pair_of()) as url:
        assert asyncio.run(ask(url)) == ("WHO?", "WHO?")


def test_earlier_output_can_be_sent_as_input_again(client):
    first = client.responses.create(model=MODEL, input="Who is Anna?")
    follow_up = {"role": "user", "content": [{"type": "input_text", "text": "And Bob?"}]}
    second = client.responses.create(model=MODEL, input=[*HELLO, *first.output, follow_up])
    expected = (
        "Earlier messages:\nuser: Who is Anna?\nassistant: WHO IS ANNA?\n\nThe question now: And Bob?"
    ).upper()
    assert second.output_text == expected
    with pytest.raises(openai.BadRequestError, match="the server keeps no conversations"):
        client.responses.create(model=MODEL, input="And Bob?", previous_response_id=first.id)


def test_instructions_are_a_system_message(client):
    response = client.responses.create(model=MODEL, input="Who?", instructions="Answer in French.")
    assert response.prompt_r1["system_to"] == "environment"
    with (
        serving(pair_of(system="refuse")) as url,
        openai.OpenAI(base_url=url, api_key="none") as other,
        pytest.raises(openai.BadRequestError, match="--system"),
    ):
        other.responses.create(model=MODEL, input="Who?", instructions="Answer in French.")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_without_an_answer_is_incomplete_and_a_refusal(client, stream):
    reply = client.responses.create(model=MODEL, input="9: Who?", stream=stream, extra_body={"max_turns": 2})
    if stream:
        events = list(reply)
        assert [event.type for event in events if "refusal" in event.type] == [
            "response.refusal.delta",
            "response.refusal.done",
        ]
        assert events[-1].type == "response.incomplete"
        reply = events[-1].response
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[0].content[0].refusal == "The agent ended without an answer (max_turns)."


class Failing:
    async def ask(self, messages):
        raise EnvError("HTTP 500 from the model")


def test_a_failed_game_is_an_error_of_the_stream():
    with (
        serving(pair_of(pool=pool_of(Failing()))) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        stream = client.responses.create(model=MODEL, input="Who?", stream=True)
        with pytest.raises(openai.APIError, match="HTTP 500 from the model") as raised:
            list(stream)
    assert raised.value.body["type"] == "environment_error"


def test_tools_are_refused_with_the_reason(client):
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    with pytest.raises(openai.BadRequestError, match="the agent's only tool is its environment"):
        client.responses.create(model=MODEL, input="Who?", tools=[tool])
    assert client.responses.create(model=MODEL, input="Who?", tools=[]).output_text


# --- JSON of a schema -----------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    name: str
    age: int


class Clerk:
    """Answers questions, and writes the same JSON each time that it is asked for some."""

    def __init__(self, reply: str = '{"name": "Anna", "age": 31}', *, seconds: float = 0.0) -> None:
        self.reply = reply
        self.seconds = seconds  # for writing JSON
        self.prompts: list[str] = []

    async def ask(self, messages):
        self.prompts.append(messages[-1]["content"])
        if "JSON schema" not in self.prompts[-1]:
            return "Anna, who is 31"
        await asyncio.sleep(self.seconds)
        return self.reply


def schema_of(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


def ask(clerk: object, *, limits: Limits | None = None, pool=None, **fields):
    with (
        serving(pair_of(pool=pool or pool_of(clerk), limits=limits)) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        return client.chat.completions.create(model=MODEL, messages=HELLO, **fields)


def test_the_environment_writes_the_answer_as_json_in_one_more_counted_call():
    clerk = Clerk()
    with serving(pair_of(pool=pool_of(clerk))) as url, openai.OpenAI(base_url=url, api_key="x") as client:
        parsed = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Person)
        assert parsed.choices[0].message.parsed == Person(name="Anna", age=31)
        assert parsed.usage.environment["calls"] == 2
        assert "Who is Anna?" in clerk.prompts[1] and "Anna, who is 31" in clerk.prompts[1]
        response = client.responses.parse(model=MODEL, input="Who is Anna?", text_format=Person)
        assert response.output_parsed == Person(name="Anna", age=31)
        with client.responses.stream(model=MODEL, input="Who?", text_format=Person) as stream:
            assert stream.get_final_response().output_parsed == Person(name="Anna", age=31)


@pytest.mark.parametrize(
    ("reply", "wrong"),
    [
        ('{"name": "Anna", "age": "31"}', "at $.age, '31' is not of type 'integer'"),
        ('{"name": "Anna"}', "'age' is a required property"),
        ("Anna", "it is not JSON"),
        ('{"name": "Anna", "age": NaN}', "it is not JSON: Out of range float"),
    ],
)
def test_a_reply_that_does_not_match_the_schema_is_an_error(reply, wrong):
    with pytest.raises(openai.APIStatusError) as raised:
        ask(Clerk(reply), response_format=schema_of(Person.model_json_schema()))
    assert raised.value.status_code == 502 and raised.value.type == "schema_mismatch"
    assert wrong in str(raised.value) and raised.value.response.headers["x-should-retry"] == "false"


def test_json_in_a_block_of_markdown_is_read():
    reply = ask(Clerk('```json\n{"age": 31}\n```\n'), response_format=schema_of({"type": "object"}))
    assert json.loads(reply.choices[0].message.content) == {"age": 31}


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "nonsense"}, {"type": "string", "pattern": "("}),
        *({"$ref": "http://127.0.0.1:9/schema"}, {"$ref": "#"}),
    ],
)
def test_a_schema_that_cannot_be_applied_is_a_bad_request_and_nothing_is_fetched(schema):
    with pytest.raises(openai.BadRequestError, match="JSON schema") as raised:
        ask(Clerk('"x"'), response_format=schema_of(schema))
    assert raised.value.body["param"] == "response_format"


@pytest.mark.parametrize(("most", "calls", "refused"), [(2, 2, False), (1, 0, True), (0, 0, True)])
def test_the_call_for_the_form_counts_in_the_limits(most, calls, refused):
    """With one call, the agent may not ask, as this one is left for the form."""
    reply = ask(
        Clerk(), response_format=schema_of(Person.model_json_schema()), extra_body={"max_calls": most}
    )
    assert reply.usage.environment["calls"] == calls
    assert bool(reply.choices[0].message.refusal) == refused


def test_the_call_for_the_form_is_paid_within_the_limit_in_dollars():
    dear = schema_of({"type": "object", "description": "long " * 300})
    with pytest.raises(openai.APIStatusError, match="may exceed the limit of") as raised:
        ask(None, pool=paid_pool(), limits=Limits(usd=0.3), response_format=dear)
    assert raised.value.status_code == 402


def test_the_call_for_the_form_ends_with_the_time_of_the_question():
    with pytest.raises(openai.APIStatusError, match="no answer within the limit of") as raised:
        ask(Clerk(seconds=30), limits=Limits(seconds=0.5), response_format=schema_of({"type": "object"}))
    assert raised.value.status_code == 504


def test_stop_cuts_the_answer_before_it_is_written_as_json():
    clerk = Clerk()
    ask(clerk, stop=", who", response_format=schema_of({"type": "object"}))
    assert "Answer: Anna\n" in clerk.prompts[1]


def test_an_environment_that_fails_at_the_form_is_an_error():
    class Tired(Clerk):
        async def ask(self, messages):
            if self.prompts:
                raise EnvError("HTTP 500 from the clerk")
            return await super().ask(messages)

    with pytest.raises(openai.InternalServerError, match="HTTP 500 from the clerk"):
        ask(Tired(), response_format=schema_of({"type": "object"}))
