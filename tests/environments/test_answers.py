"""What follows from a server's answer: a table, played through `Environment.ask`. No network, no clock."""

import asyncio
import json
import time
from email.utils import formatdate

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.environments.check import check_servers
from prompt_r1.environments.reply_text import reply_of
from prompt_r1.environments.responses import read_reply, requested_wait
from prompt_r1.environments.sources import Busy, Reply
from prompt_r1.errors import EnvError, FatalEnvError, Resumable
from tests.support.at_once import at_once
from tests.support.clock import run_jumping, seconds_of
from tests.support.paths import ROOT
from tests.support.providers import (
    HELLO,
    NOW,
    OK,
    Provider,
    ask,
    body_of,
    environment_over,
    error_of,
    read_body,
    reply,
)

CASES = ROOT / "tests/environments/cases"
FAILED_ENDS = ("error", "ERROR", "network_error", "abort", "cancelled", "insufficient_system_resource")
FULL_ENDS = (
    "length",
    "time_limit",
    "MAX_TOKENS",
    "model_length",
    "max_tokens",
    "model_context_window_exceeded",
)
FIELDS = st.sampled_from(["error", "choices", "message", "content", "refusal", "usage", "code"])
# The texts that st.text() draws. Without an alphabet, it would try to encode each character, which is slow.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON_VALUES = st.recursive(
    SCALARS, lambda values: st.lists(values) | st.dictionaries(FIELDS, values), max_leaves=10
)
JSON_BODIES = JSON_VALUES.map(lambda value: json.dumps(value).encode())
TOO_LONG = [
    (400, "This model's maximum context length is 4096 tokens. You requested 5000"),  # OpenAI, DeepSeek
    (400, "The decoder prompt (length 5000) is longer than the maximum model length of 4096"),  # vLLM
    (400, "However, the model's context length is only 4096 tokens, resulting in a maximum input"),  # vLLM
    (400, "Requested token count exceeds the model's maximum context length of 4096 tokens."),  # SGLang
    (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),  # SGLang
    (400, "the request exceeds the available context size. try increasing the context size"),  # llama.cpp
    (400, "prompt is too long: 208310 tokens > 200000 maximum"),  # Anthropic
    (400, "input length and `max_tokens` exceed context limit: 199000 + 8192 > 200000"),  # Anthropic
    (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (9)"),  # Gemini
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
    run_jumping(asked.ask(HELLO))
    asked.take_metrics()
    try:
        text = run_jumping(asked.ask([{"role": "user", "content": "And the Prado?"}])).text
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
    ({**body_of("Paris"), "error": {"message": "", "code": None}}, "Paris"),  # It was paid, and sent again.
    (body_of([{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris"}]), "Paris"),
    (body_of([{"type": "thinking", "thinking": "France?"}, {"type": "text", "text": "Paris"}]), "Paris"),
    (body_of("Paris", reasoning_content="Lyon?"), "Paris"),
    (body_of("Close it with </think>.", reasoning_content="Which tag?"), "Close it with </think>."),
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
    # Bugs: each of these was read as part of the reply.
    (body_of("<thinking>Who?</thinking>\nAnna."), "Anna."),
    (body_of("<thought>Who?</thought>Anna."), "Anna."),
    (body_of("<seed:think>Who?</seed:think>Anna."), "Anna."),
    (body_of("◁think▷Who?◁/think▷Anna."), "Anna."),
    (body_of("Who?[/THINK]Anna."), "Anna."),
    (body_of("Anna.[|endofturn|]"), "Anna."),
    (body_of("Anna.[PAD][PAD]"), "Anna."),
    (body_of("Anna.<|eot_id|>\n</s>"), "Anna."),
    (body_of("Anna.<|im_end|>"), "Anna."),
    (body_of("Anna.<｜end▁of▁sentence｜>"), "Anna."),
    (body_of("Anna.<|END_OF_TURN_TOKEN|>"), "Anna."),
    # These are ordinary text. A bug: norms and absolute values were cut off, as if they were end tokens.
    (body_of("The distance is [|x - y|]"), "The distance is [|x - y|]"),
    (body_of("Norm: <|x|>"), "Norm: <|x|>"),
    (body_of("The energy is <|psi|>"), "The energy is <|psi|>"),
    (body_of("A <thought> of hers: [1|2]"), "A <thought> of hers: [1|2]"),
    (body_of("I am thinking of </div>"), "I am thinking of </div>"),
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
        (200, body_of("\n", refusal="I cannot help."), "refusal", "I cannot help."),
        (200, body_of("", finish="content_filter"), "content_filter", ""),
        (200, body_of("Half", finish="content_filter"), "content_filter", "Half"),
        (200, body_of(None, finish="SAFETY"), "content_filter", ""),
        *((200, body_of("", finish=name), "length", "") for name in FULL_ENDS),
        (200, body_of("\n<think>\nWho could", finish="length"), "length", ""),
        (200, body_of("<think>Who?</think>"), "empty", ""),
        (400, error_of("filtered", code="content_filter"), "content_filter", ""),
        (400, error_of("too long", code="context_length_exceeded"), "context_length", ""),
        (400, error_of("too long", code=400, type="exceed_context_size_error"), "context_length", ""),
        *((status, error_of(text), "context_length", "") for status, text in TOO_LONG),
        (413, b"", "context_length", ""),
        (
            429,
            error_of("Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 42000."),
            "context_length",
            "",
        ),
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
        response_of(500, error_of("token limit service down")),
        response_of(200, error_of("Provider returned error", code=502)),
        response_of(200, error_of("slow down", code="429")),
        response_of(200, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
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
        # A bug: these were read as dialogues that are too long, so the game went on without a reply.
        (400, error_of("max_length must be positive"), "max_length must be positive"),
        (400, error_of("max_tokens must be <= 8192"), "max_tokens must be <= 8192"),
        (400, error_of("the stop sequence is too long"), "the stop sequence is too long"),
        (422, error_of("invalid input: token_limit is unknown"), "token_limit is unknown"),
        (400, error_of("context_window is no parameter"), "context_window is no parameter"),
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
def test_a_refusal_fails_the_check(status: int, body: object) -> None:
    with pytest.raises(FatalEnvError, match="large"):
        asyncio.run(check_servers(environment_over(Provider(response_of(status, body)))))


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        ("retry-after", "20", 20),
        ("retry-after", "0.5", 0.5),
        ("retry-after", "500", 120),
        ("retry-after-ms", "1500", 1.5),
        ("Retry-After", formatdate(4e9, usegmt=True), 120),  # in 2096
        ("retry-after", "soon", None),
        ("retry-after", "-10", None),
        ("retry-after", "nan", None),
        ("retry-after", "9" * 400, 120),
    ],
)
def test_the_wait_that_a_server_asks_for_is_kept_up_to_120_seconds(name, value, seconds) -> None:
    busy = httpx.Response(429, headers={name: value})
    waited = seconds_of(reply(environment_over(Provider(busy, OK))))
    if seconds is None:
        assert waited <= 0.5  # the first back-off
    else:
        assert waited == pytest.approx(seconds)


def paid_for(usage: object) -> tuple[int, int]:
    """The tokens that are charged for a reply with this usage."""
    asked = environment_over(Provider(response_of(200, {**body_of("Paris, in"), "usage": usage})))
    asyncio.run(asked.ask(HELLO))
    return asked.budget.charged.tokens_in, asked.budget.charged.tokens_out


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4}, (9, 4)),
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 1}, (9, 4)),
        # OpenAI: the cached tokens are a part of the prompt, and the thinking a part of the completion.
        ({"prompt_tokens": 90, "completion_tokens": 70, "total_tokens": 160,
          "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": 0},
          "completion_tokens_details": {"reasoning_tokens": 60, "audio_tokens": None}}, (90, 70)),
        # DeepSeek, and vLLM
        ({"prompt_tokens": 90, "completion_tokens": 5, "total_tokens": 95, "prompt_cache_hit_tokens": 64,
          "prompt_cache_miss_tokens": 26}, (90, 5)),
        ({"prompt_tokens": 90, "completion_tokens": 5, "prompt_tokens_details": None}, (90, 5)),
        # Gemini: only the total has the thinking.
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 113}, (9, 104)),
        ({"prompt_tokens": 9}, (9, 9)),  # a token for each byte
        ({"prompt_tokens": "9", "completion_tokens": 4.0}, (20, 9)),
        ({"prompt_tokens": -9, "completion_tokens": 10**400}, (20, 9)),
        ({"prompt_tokens": True, "completion_tokens": 10_000_001}, (20, 9)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, (20, 9)),
        (None, (20, 9)),
        ([7], (20, 9)),
    ],
)  # fmt: skip
def test_the_tokens_of_a_reply_are_those_of_its_usage_or_an_estimate(usage, tokens) -> None:
    """Bugs: a reply without usage was free; thinking that only the total has was; 10**400 was an error."""
    assert paid_for(usage) == tokens


def lines_of(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (CASES / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", lines_of("usage.jsonl"))
def test_cached_tokens_are_input_and_only_the_rest_of_a_total_is_output(case: dict[str, object]) -> None:
    """A bug: 10,536 tokens from a cache were billed as output, so a budget ended five times too early."""
    assert paid_for(case["usage"]) == (case["tokens_in"], case["tokens_out"])


@pytest.mark.parametrize("case", lines_of("replies.jsonl"))
def test_the_tokens_that_end_a_reply_are_cut_off(case: dict[str, object]) -> None:
    """A bug: with `</s>` at the end of every reply, EM and F1 were 0 for every method."""
    assert what_follows(response_of(200, body_of(case["content"]))) == ("reply", case["reply"])


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("Paris" + " " * 200_000 + ".", "Paris" + " " * 200_000 + "."),
        ("<|" * 99_000, "<|" * 99_000),
        ("Paris" + " </s>" * 999, "Paris"),
    ],
    ids=["blanks", "brackets", "tokens"],
)
def test_the_end_of_a_very_long_reply_is_found_at_once(written: str, text: str) -> None:
    """A bug: the time grew with the square of a run of blanks, and no other game played meanwhile."""
    assert reply_of(written).text == text


@pytest.mark.parametrize(("before", "after"), [("", "</s>"), ("</think>", "")])
def test_the_time_to_read_a_reply_grows_with_its_length_and_not_with_its_square(before, after) -> None:
    """A bug: a reply of 2 MB held up all other games for 13 seconds."""

    def seconds(count: int) -> float:
        written = before * count + "Paris" + after * count
        begin = time.process_time()
        assert reply_of(written).text == "Paris"
        return time.process_time() - begin

    assert seconds(200_000) < 24 * seconds(25_000), "eight times as long takes about eight times the time"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, error_of("Incorrect API key")),
        (402, {"error": "Payment required"}),
        (403, {"message": "Not in your country"}),
        (429, error_of("You exceeded your current quota", code="insufficient_quota")),
        (200, error_of("Incorrect API key", code=401)),
    ],
)
def test_an_endpoint_that_accepts_no_calls_stops_the_run(status: int, body: object) -> None:
    """Every game would break; the run can be resumed with a new key or credit."""
    follows, reason = what_follows(response_of(status, body))
    assert follows == "stop" and "large accepts no calls: HTTP" in reason


def test_a_status_inside_a_200_decides_as_one_outside_of_it() -> None:
    follows, reason = what_follows(response_of(200, error_of("Content Exists Risk", code=400)))
    assert follows == "refused" and "HTTP 200: Content Exists Risk" in reason


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Log in</html>",
        {"error": "Unexpected endpoint or method. (POST /chat/completions)"},  # LM Studio, without /v1
        {"choices": []},
        body_of(""),
        body_of(None, finish="tool_calls"),
        b': ping\n\ndata: {"choices": [{"delta": {"content": "Par"}}]}\n\n',
        json.dumps(body_of("Paris")).encode()[:-9],
        json.dumps(body_of("Z\u00fcrich"), ensure_ascii=False).encode("latin-1"),
    ],
)
def test_after_six_responses_without_a_reply_a_call_is_refused_with_the_words_of_the_last(body) -> None:
    """They may be billed, and ten minutes of them would be hundreds."""
    no_reply = response_of(200, body)
    follows, reason = what_follows(*[no_reply] * 5)
    assert follows == "busy"
    follows, reason = what_follows(*[no_reply] * 6)
    said = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert follows == "refused" and "6 responses without a reply" in reason
    assert said[:6].decode(errors="replace") in reason or "Unexpected endpoint" in reason


@pytest.mark.parametrize(
    ("message", "follows"),
    [
        ("max_tokens is too large: 100000. This model supports at most 16384 completion tokens", "refused"),
        ("'max_tokens' is too large: 512. This model's maximum context length is 4096", "context_length"),
    ],
)
def test_a_limit_of_replies_that_is_too_large_is_no_dialogue_that_is_too_long(message, follows) -> None:
    """A bug: with OpenAI's words (the first ones), every reply was empty and nothing said why."""
    body = error_of(message, param="max_tokens", code="invalid_value")
    assert what_follows(response_of(400, body))[0] == follows


UNSUPPORTED = {"code": "unsupported_parameter", "type": "invalid_request_error"}
NO_MAX_TOKENS = error_of("no", param="max_tokens", **UNSUPPORTED)
EXTRA = {"type": "extra_forbidden", "loc": ["body", "top_k"], "msg": "Extra inputs are not permitted"}


@pytest.mark.parametrize(
    ("fields", "status", "body", "left"),
    [
        (
            {"max_tokens": 9},
            400,
            error_of("no", param="max_tokens", **UNSUPPORTED),
            {"max_completion_tokens": 9},
        ),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 400, NO_MAX_TOKENS, {"max_completion_tokens": 5}),
        ({"temperature": 0}, 400, error_of("no", param="temperature", code="unsupported_value"), {}),
        ({"top_k": 5, "top_p": 1}, 422, {"detail": [EXTRA]}, {"top_p": 1}),
    ],
)
def test_a_field_that_the_server_does_not_know_is_left_out_of_all_later_requests(fields, status, body, left):
    """A bug: the user's own max_completion_tokens was overwritten by the max_tokens that was rejected."""
    provider = Provider(response_of(status, body), OK)
    asked = environment_over(provider, fields={**fields, "seed": 1})
    assert [ask(asked), ask(asked)] == ["Paris", "Paris"]
    plain = {"model": "large", "messages": HELLO, "seed": 1}
    assert provider.requests == [{**plain, **fields}, {**plain, **left}, {**plain, **left}]
    assert asked.take_metrics()["env/failed_requests"] == 0, "it was sent again at once"


def test_equal_calls_share_a_reply_if_the_server_rejects_temperature_0_also_after_a_resume(tmp_path) -> None:
    """Which calls share a reply depends on the settings alone, and not on whether the check got a reply."""
    sent = 0

    async def reasoning_model(request: httpx.Request) -> httpx.Response:
        nonlocal sent
        if "temperature" in json.loads(request.content):
            return response_of(400, error_of("no", param="temperature", code="unsupported_value"))
        sent += 1
        return response_of(200, body_of(f"reply {sent}"))

    def five_games(temperature: float, *, is_checked: bool) -> list[str]:
        asked = environment_over(reasoning_model, fields={"temperature": temperature}, folder=tmp_path)
        if is_checked:
            asyncio.run(check_servers(asked))
        return at_once(reply(asked, sample=sample) for sample in range(5))

    assert five_games(0, is_checked=True) == ["reply 2"] * 5, "the first reply was the check's"
    assert five_games(0, is_checked=False) == ["reply 2"] * 5
    assert sorted(five_games(1, is_checked=False)) == [f"reply {number}" for number in range(3, 8)]


def test_the_limit_of_a_reply_is_never_left_out() -> None:
    """A bug: after both names of the limit had been dropped, 9 tokens were still reserved for a reply."""
    no_limit = error_of("no such field", param="max_completion_tokens", **UNSUPPORTED)
    provider = Provider(response_of(400, NO_MAX_TOKENS), response_of(400, no_limit), OK)
    asked = environment_over(provider, fields={"max_tokens": 9})
    with pytest.raises(FatalEnvError, match="HTTP 400: no such field"):
        asyncio.run(check_servers(asked))
    assert len(provider.requests) == 2 and provider.requests[-1]["max_completion_tokens"] == 9
    [client] = asked.clients
    assert client.estimate(HELLO).tokens_out == 9
    # The parameters of the user stay in the key of the call, so that a resumed run finds its reply.
    assert client.source.parameters["max_tokens"] == 9


def test_two_calls_at_once_whose_field_is_rejected_are_both_sent_again() -> None:
    """A bug in waiting: the second call found the field dropped already, and ended the run as refused."""
    requests = []

    async def strict(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        requests.append(sent)
        await asyncio.sleep(0.01)
        return OK if "top_k" not in sent else response_of(400, error_of("no", param="top_k", **UNSUPPORTED))

    asked = environment_over(strict, fields={"top_k": 5})
    assert at_once([reply(asked), reply(asked)]) == ["Paris", "Paris"]
    assert ["top_k" in request for request in requests] == [True, True, False, False]


def test_the_check_of_an_environment_goes_on_without_a_field_that_is_rejected() -> None:
    """A bug: the check took the endpoint for a busy one, and did not find that the key is wrong."""
    rejected = response_of(400, error_of("no", param="top_k", **UNSUPPORTED))
    provider = Provider(rejected, response_of(401, error_of("wrong key")))
    with pytest.raises(FatalEnvError, match="HTTP 401: wrong key"):
        asyncio.run(check_servers(environment_over(provider, fields={"top_k": 5})))
    assert ["top_k" in request for request in provider.requests] == [True, False]


@pytest.mark.parametrize(
    "body",
    [
        {"detail": [{"loc": ["body", "messages"], "msg": "bad", "input": "What is temperature?"}]},
        error_of("decimal above maximum value", param="temperature", code="decimal_above_max_value"),
        {"detail": [{"loc": ["body", "temperature"], "type": "less_than_equal", "msg": "at most 2"}]},
        error_of("temperature must be between 0 and 0.5"),
    ],
)
def test_a_value_that_is_wrong_is_refused_and_no_field_is_dropped(body: object) -> None:
    """A bug: a 422 that echoed the question dropped `temperature` for the whole run."""
    follows, _ = what_follows(response_of(422, body), fields={"temperature": 0.7})
    assert follows == "refused"


@settings(max_examples=60)
@given(st.integers(100, 599), st.binary() | JSON_BODIES)
def test_any_response_is_a_reply_or_a_sentence(status: int, body: bytes) -> None:
    came = read_body(status, body)
    assert isinstance(came, Reply) or str(came)


@given(TEXTS)
def test_any_retry_after_header_can_be_read(value: str) -> None:
    wait = requested_wait({"retry-after": value, "retry-after-ms": value}, now=NOW)
    assert wait is None or 0 < wait <= 120


def test_a_date_in_retry_after_is_waited_for() -> None:
    dates = {seconds: formatdate(NOW + seconds, usegmt=True) for seconds in (20, 500, -20)}
    waits = {seconds: requested_wait({"retry-after": date}, now=NOW) for seconds, date in dates.items()}
    assert waits == {20: 20, 500: 120, -20: None}


@pytest.mark.parametrize(("status", "may_be_billed"), [(503, False), (504, True), (524, True), (529, False)])
def test_a_request_that_a_proxy_has_given_up_may_be_billed(status, may_be_billed):
    """The server behind the proxy may go on, and its reply counted as free."""
    with pytest.raises(Busy) as busy:
        read_reply(status, {}, b"", now=0)
    assert busy.value.may_be_billed == may_be_billed
