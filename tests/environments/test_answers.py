"""What follows from an answer of a server: a table, played through `Environment.ask`. No network, no clock."""

import asyncio
import json
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest

from prompt_r1.errors import EnvError, FatalEnvError, Resumable
from tests.support.paths import ROOT
from tests.support.providers import HELLO, OK, Provider, RecordedSleep, body_of, environment_over, error_of

CASES = ROOT / "tests/environments/cases"
FAILED_ENDS = ("error", "ERROR", "network_error", "abort", "insufficient_system_resource")
FULL_ENDS = ("length", "MAX_TOKENS", "token_limit", "tokenLimit", "truncated", "FINISH_REASON_MAX_TOKENS")
TOO_LONG = [
    (400, "This model's maximum prompt length is 131072 but the request contains 537812 tokens."),  # xAI
    (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 512. Given: 900"),  # TGI
    (400, "too many tokens: total number of tokens in the prompt cannot exceed 4081"),  # Cohere
    (400, "Range of input length should be [1, 30720]"),  # DashScope
    (400, "The decoder prompt (length 5000) is longer than the maximum model length of 4096"),  # vLLM
    (500, "the request exceeds the available context size. try increasing the context size"),  # llama.cpp
    (400, "prompt is too long: 208310 tokens > 200000 maximum"),  # Anthropic
    (400, "Input tokens exceeds limit"),  # Baichuan
    (400, "Your request exceeded model token limit: 8192"),  # Moonshot
    (422, "Input validation error: `inputs` must have less than 1024 tokens. Given: 1100"),  # TGI
]


def response_of(status: int, body: object, **headers: str) -> httpx.Response:
    """A response with this body: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.Response(
        status, content=content, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def what_follows(*answers: httpx.Response | Exception, **settings: object) -> tuple[str, str]:
    """What follows from answers, of an endpoint that has replied before and will again.

    "reply", the label of a reply, "busy" (the request was sent again), "refused" (the game breaks) or "stop"
    (the run does); and the text of the reply, or why there is none.
    """
    provider = Provider(OK, *answers, OK)
    asked = environment_over(provider, **settings)
    asyncio.run(asked.ask(HELLO))
    asked.take_metrics()
    try:
        text = asyncio.run(asked.ask([{"role": "user", "content": "And the Prado?"}]))
    except EnvError as error:
        return "refused", str(error)
    except Resumable as error:
        return "stop", str(error)
    if len(provider.requests) > 2:
        return "busy", text
    labels = [name.removeprefix("env/outcomes/") for name in asked.take_metrics() if "outcomes" in name]
    return (labels[0] if labels else "reply"), text


REPLIES = [
    (body_of("Paris"), "Paris"),
    (body_of([{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris"}]), "Paris"),
    (body_of([{"type": "thinking", "thinking": "France?"}, {"type": "text", "text": "Paris"}]), "Paris"),
    (body_of("Paris", reasoning_content="Lyon?"), "Paris"),
    (body_of("Half a sen", finish="length"), "Half a sen"),
    (body_of("Paris", finish="eos"), "Paris"),
    (body_of("Paris", finish=None), "Paris"),
    (body_of("Paris") | {"error": None}, "Paris"),
    (body_of("Paris") | {"detail": "insufficient_quota is an error code"}, "Paris"),
    (body_of("Pa\ud800ris\0"), "Pa?ris"),
    (body_of(" Anna. "), " Anna. "),
    (body_of("<think>\nWho?\n</think>\n\nAnna."), "Anna."),
    (body_of("[THINK]Who?[/THINK]Anna."), "Anna."),
    (body_of("<think>\n</think>\n<think>Who?</think>Anna."), "Anna."),
    (body_of("Who?\n</think>\n\nAnna."), "Anna."),  # the chat template opens the block
    (body_of("Who?</think>Anna."), "Anna."),
    (body_of("<thoughtful> Anna."), "<thoughtful> Anna."),
    (body_of("As in\n<think>\n</think>\nso."), "As in\n<think>\n</think>\nso."),
]


@pytest.mark.parametrize(("body", "text"), REPLIES)
def test_the_text_of_a_chat_completion_is_the_reply(body: object, text: str) -> None:
    assert what_follows(response_of(200, body)) == ("reply", text)


@pytest.mark.parametrize(
    ("status", "body", "label", "text"),
    [
        (200, body_of(None, refusal="I cannot help."), "refusal", "I cannot help."),
        (200, body_of("", finish="content_filter"), "content_filter", ""),
        (200, body_of("Half", finish="content_filter"), "content_filter", "Half"),
        (200, body_of(None, finish="SAFETY"), "content_filter", ""),
        *((200, body_of("", finish=name), "length", "") for name in FULL_ENDS),
        (200, body_of("\n<think>\nWho could", finish="length"), "length", ""),
        (200, body_of("<think>Who?</think>"), "empty", ""),
        (400, error_of("filtered", code="content_filter"), "content_filter", ""),
        (400, error_of("too long", code="context_length_exceeded"), "context_length", ""),
        (400, error_of("maximum context length is 4096 tokens, max_tokens 9"), "context_length", ""),
        *((status, error_of(text), "context_length", "") for status, text in TOO_LONG),
        (413, b"", "context_length", ""),
    ],
)
def test_refusals_and_limits_are_labelled_replies(status: int, body: object, label: str, text: str) -> None:
    assert what_follows(response_of(status, body)) == (label, text)


@pytest.mark.parametrize(
    "answer",
    [
        *(response_of(status, b"") for status in (408, 409, 425, 429, 500, 502, 503, 504, 529)),
        response_of(429, error_of("too many tokens per minute")),
        response_of(500, error_of("DeadlineExceeded desc = context deadline exceeded")),  # no length
        response_of(200, error_of("Provider returned error", code=502)),
        response_of(200, error_of("slow down", code="429")),
        response_of(200, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
        response_of(200, {"choices": [{**body_of("Par")["choices"][0], "error": {"code": 502}}]}),
        *(response_of(200, body_of("The director of Sil", finish=finish)) for finish in FAILED_ENDS),
        response_of(200, {"choices": [None]}),
        response_of(200, {"choices": "none"}),
        response_of(200, b"[" * 100_000),
        response_of(200, b"\xff\xfe\x00"),
        response_of(200, b"<html>Log in</html>"),
        response_of(200, body_of("  \n")),
        response_of(200, body_of(None, reasoning_content="Paris.")),
        httpx.ReadError("reset"),
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ],
)
def test_after_a_temporary_failure_the_request_is_sent_again(answer: httpx.Response | Exception) -> None:
    assert what_follows(answer) == ("busy", "Paris")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, error_of("Content Exists Risk"), "HTTP 400: Content Exists Risk"),
        (400, error_of("inappropriate", code="data_inspection_failed"), "HTTP 400: inappropriate"),
        (404, error_of("The model `larg` does not exist", code="model_not_found"), "`larg`"),
        (404, b"<html>nginx</html>", "nginx"),
        (400, {"errors": ["model is required"]}, "model is required"),
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}, "Field required"),
        (301, b"", "HTTP 301"),
        (451, b"", "HTTP 451"),
    ],
)
def test_another_error_of_one_dialogue_breaks_its_game_with_the_servers_words(status, body, words) -> None:
    follows, reason = what_follows(response_of(status, body))
    assert follows == "refused" and words in reason and "large refused the dialogue" in reason


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, error_of("Incorrect API key")),
        (402, {"error": "Payment required"}),
        (403, {"message": "Not in your country"}),
        (404, error_of("The model `larg` does not exist")),
        (429, error_of("You exceeded your current quota", code="insufficient_quota")),
        (400, error_of("API key not valid")),
    ],
)
def test_before_any_reply_a_refusal_ends_the_run(status: int, body: object) -> None:
    with pytest.raises(FatalEnvError, match="large"):
        asyncio.run(environment_over(Provider(response_of(status, body))).ask(HELLO))


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        ("retry-after", "20", 20),
        ("retry-after", "0.5", 0.5),
        ("retry-after", "500", 120),
        ("retry-after-ms", "1500", 1.5),
        ("Retry-After", formatdate(4e9, usegmt=True), None),  # in 2096: not believed
        ("retry-after", "soon", None),
        ("retry-after", "-10", None),
        ("retry-after", "nan", None),
        ("retry-after", "9" * 400, None),
    ],
)
def test_the_wait_that_a_server_asks_for_is_kept_up_to_120_seconds(name, value, seconds) -> None:
    sleep = RecordedSleep()
    busy = httpx.Response(429, headers={name: value})
    assert what_follows(busy, sleep=sleep) == ("busy", "Paris")
    [waited] = sleep
    assert waited == seconds if seconds else waited <= 0.5  # the first back-off


def lines_of(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (CASES / name).read_text().splitlines()]


def paid_for(usage: object) -> tuple[int, int]:
    """The tokens that are charged for a reply with this usage."""
    asked = environment_over(Provider(response_of(200, {**body_of("Paris, in"), "usage": usage})))
    asyncio.run(asked.ask(HELLO))
    return asked.budget.spent.tokens_in, asked.budget.spent.tokens_out


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"input_tokens": 9, "output_tokens": 4}, (9, 4)),
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 113}, (9, 104)),
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 1}, (9, 4)),
        ({"prompt_tokens": "9", "completion_tokens": 4.0}, (9, 4)),
        ({"prompt_tokens": 9}, (9, 3)),  # a token has three characters
        ({"prompt_tokens": -9, "completion_tokens": 10**400}, (7, 3)),
        ({"prompt_tokens": True, "completion_tokens": 10_000_001}, (7, 3)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, (7, 3)),
        (None, (7, 3)),
        ([7], (7, 3)),
    ],
)
def test_the_tokens_of_a_reply_are_those_of_its_usage_or_an_estimate(usage, tokens) -> None:
    """Bugs: a reply without usage was free; thinking that only the total has was; 10**400 was an error."""
    assert paid_for(usage) == tokens
