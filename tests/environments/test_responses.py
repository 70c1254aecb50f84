"""Classification of responses, and the wait before a retry. No network, no clock."""

import gzip
import json
import random
import zlib
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.environments.responses import back_off, classify, requested_wait
from prompt_r1.environments.sources import Outcome, without_thinking
from tests.support.providers import NOW, body_of, classify_body, error_of

FAILED_ENDS = ("error", "ERROR", "network_error", "abort", "insufficient_system_resource")
FULL_ENDS = ("length", "MAX_TOKENS", "token_limit", "tokenLimit", "truncated", "FINISH_REASON_MAX_TOKENS")
LONG_CODES = ("input_too_long", "string_above_max_length", "exceed_context_size_error")
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


def outcome_of_body(status: int, body: object) -> Outcome:
    return classify_body(status, body).outcome


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Paris", "Paris"),
        ([{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris"}], "Paris"),
        (["Pa", {"type": "image_url", "image_url": {}}, "ris"], "Paris"),
        ([{"type": "output_text", "text": {"value": "Paris", "annotations": []}}], "Paris"),
        ([{"type": "reasoning", "text": "France?"}, {"text": "Paris"}], "Paris"),
        ([{"text": "France?", "thought": True}, {"text": "Paris"}], "Paris"),
        ("Pa\ud800ris\0", "Pa?ris"),
    ],
)
def test_a_reply_is_a_string_or_a_list_of_parts(content: object, text: str) -> None:
    assert outcome_of_body(200, body_of(content)) == Outcome("ok", text=text, finish="stop")


@pytest.mark.parametrize(
    ("status", "body", "label", "text"),
    [
        (200, body_of(None, refusal="I cannot help."), "refusal", "I cannot help."),
        (200, body_of([{"type": "refusal", "refusal": "I cannot."}]), "refusal", "I cannot."),
        (200, body_of("", finish="content_filter"), "content_filter", ""),
        *((200, body_of("", finish=name), "length", "") for name in FULL_ENDS),
        *((200, body_of(None, finish=name), "content_filter", "") for name in ("SAFETY", "MODEL_ARMOR")),
        (200, body_of("Half", finish="content_filter: hate"), "content_filter", "Half"),
        (200, {"choices": [{"finish_reason": "PROHIBITED_CONTENT"}]}, "content_filter", ""),
        (400, error_of("too long", code="context_length_exceeded"), "context_length", ""),
        (400, error_of("maximum context length is 4096 tokens, max_tokens 9"), "context_length", ""),
        *((status, error_of(text), "context_length", "") for status, text in TOO_LONG),
        (413, b"", "context_length", ""),
        *((400, error_of("Zu lang", code=code), "context_length", "") for code in LONG_CODES),
        (400, error_of("filtered", code="content_filter"), "content_filter", ""),
    ],
)
def test_refusals_and_limits_are_labelled_outcomes(status: int, body: object, label: str, text: str) -> None:
    outcome = outcome_of_body(status, body)
    assert (outcome.verdict, outcome.label, outcome.text) == ("outcome", label, text)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((status, b"") for status in (408, 409, 425, 429, 500, 502, 503, 504, 529)),
        (200, error_of("Provider returned error", code=502)),
        (200, error_of("slow down", code="429")),
        (200, {"error": "no credit"}),
        (200, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
        (200, {"status_code": "429", "message": "slow down"}),
        (200, {"choices": [{**body_of("Par")["choices"][0], "error": {"code": 502}}]}),
        (400, {"__type": "ThrottlingException", "message": "Too many requests"}),
        (400, error_of("slow down: the token limit per minute is 9", type="rate_limit_error")),
        (403, error_of("slow down", errors=[{"reason": "rateLimitExceeded"}])),
        (200, {"choices": [None]}),
        (200, {"choices": "none"}),
        (200, json.dumps(body_of()).encode()[:-9]),
        (200, b"[" * 100_000),
        (200, b"\xff\xfe\x00"),
        (200, body_of("  \n")),
        (200, body_of({"text": 3})),
        (200, body_of(None, finish="tool_calls")),
        *((200, body_of("The director of Sil", finish=finish)) for finish in FAILED_ENDS),  # half a reply
        (429, error_of("too many tokens per minute")),
        (500, error_of("DeadlineExceeded desc = context deadline exceeded")),  # no length
    ],
)
def test_a_temporary_failure_is_retried(status: int, body: object) -> None:
    assert outcome_of_body(status, body).verdict == "failed"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, error_of("Incorrect API key"), "Incorrect API key"),
        (402, {"error": "Payment required"}, "credit"),
        (401, error_of("Invalid input token: too long"), "input token"),
        (403, {"message": "Not in your country"}, "Not in your country"),
        (404, error_of("The model `larg` does not exist", code="model_not_found"), "`larg`"),
        (404, b"<html>nginx</html>", "base URL"),
        (404, {"errors": [{"code": "x", "message": "No such model"}], "status_code": 404}, "No such model"),
        (400, {"errors": ["model is required"]}, "model is required"),
        (400, error_of("Unavailable model: x", code="unavailable_model"), "Unavailable model: x"),
        (403, {"base_resp": {"status_code": 1004, "status_msg": "login fail"}}, "login fail"),
        (429, error_of("You exceeded your current quota", code="insufficient_quota"), "quota"),
        (429, error_of("insufficient_quota"), "billing"),
        (400, [error_of("API key not valid")], "API key not valid"),
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}, "Field required"),
        (301, b"", "301"),
        (451, b"", "451"),
        *((status, b"", str(status)) for status in (501, 505, 511)),  # what it will never accept
        (403, b"<title>Access denied</title>", "Access denied (a web page, not the API's answer: check the"),
        (407, b"<html>", "the proxy"),
        (400, b"model is not loaded", "HTTP 400: model is not loaded"),
        (200, error_of("Content Exists Risk", code=400), "HTTP 200: Content Exists Risk"),
        (200, {"object": "error", "message": "No such model", "code": 404}, "No such model"),
    ],
)
def test_a_refusal_has_the_providers_message(status: int, body: object, words: str) -> None:
    """Whether it concerns this dialogue or all of them, no single response tells."""
    outcome = outcome_of_body(status, body)
    assert outcome.verdict == "refused" and words in outcome.reason


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            b': ping\n\ndata: {"choices": [{"delta": {"content": "Par"}}]}\n\n',
            "a stream, which was not asked for",
        ),
        (b"<html>Log in</html>", "a web page"),
        ([], "no chat completion"),
        ({"type": "message", "message": {"content": "Paris"}}, "no chat completion"),  # of another API
        ({"status": "completed", "error": None, "output": [{"type": "message"}]}, "no chat completion"),
        ({"status": "pending", "code": 0, "message": "wait"}, "no chat completion"),
        (b"", "no chat completion"),
        (body_of(""), "an empty reply"),
        (body_of(None, reasoning_content="Paris."), "turn the server's reasoning parser off"),
    ],
)
def test_an_answer_that_is_no_reply_says_that_the_endpoint_or_its_settings_are_wrong(body, words):
    attempt = classify_body(200, body)
    assert attempt.outcome.verdict == "failed" and attempt.misdirected and words in attempt.outcome.reason


@pytest.mark.parametrize(
    ("count", "counted"),
    [
        *((count, int(count)) for count in (0, 7, 10_000_000, 7.0, "7")),
        *((count, 0) for count in (-5, 10_000_001, 10**30, 10**400, True, 7.5, 1e300, "", "many", None, [7])),
    ],
)
def test_only_a_plausible_number_of_tokens_is_believed(count: object, counted: int) -> None:
    """A bug: 10**400 tokens raised OverflowError, and negative ones gave dollars back to the budget."""
    body = body_of()
    body["usage"] = {"prompt_tokens": count, "completion_tokens": count}
    outcome = outcome_of_body(200, body)
    assert (outcome.tokens_in, outcome.tokens_out) == (counted, counted)
    assert type(outcome.tokens_in) is int


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"input_tokens": 9, "output_tokens": 4}, (9, 4)),
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 113}, (9, 104)),
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 1}, (9, 4)),
        ({"prompt_tokens": 9}, (9, 0)),
        ({"total_tokens": 13}, (0, 0)),
    ],
)
def test_the_tokens_of_thinking_count_where_only_the_total_has_them(usage, counted) -> None:
    """A bug: xAI's and Google's completion_tokens leave the thinking out, which is billed."""
    outcome = outcome_of_body(200, {**body_of(), "usage": usage})
    assert (outcome.tokens_in, outcome.tokens_out) == counted


GOOD = json.dumps(body_of("Zürich"), ensure_ascii=False)


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(GOOD.encode(), mtime=0),  # whatever the header says
        zlib.compress(GOOD.encode()),
        *(GOOD.encode(encoding) for encoding in ("utf-8-sig", "utf-16", "utf-32")),
        (GOOD[:-1] + ', "score": NaN}').encode(),
        GOOD.replace("stop", "stop\t").encode(),
        json.dumps([body_of("Zürich")]).encode(),
        {"choices": body_of("Zürich")["choices"][0]},
        {"choices": [{"text": "Zürich"}]},
        {"choices": [{"message": "Zürich"}]},
        {"choices": [{"delta": {"content": "Zürich"}}]},
        {**body_of("Zürich"), "error": {"code": 0, "message": ""}},
    ],
)
def test_a_reply_is_read_in_the_forms_that_servers_give_it(body: object) -> None:
    outcome = outcome_of_body(200, body)
    assert (outcome.verdict, outcome.text) == ("ok", "Zürich")


@pytest.mark.parametrize("charset", ["iso-8859-1", "GB18030", "utf-8"])
def test_a_body_that_is_not_utf_8_is_read_as_its_header_says(charset: str) -> None:
    """A bug: "Zürich" became "Z\ufffdrich" without a word."""
    headers = {"content-type": f'application/json; charset="{charset}"'}
    assert classify(200, headers, GOOD.encode(charset), now=NOW).outcome.text == "Zürich"


@pytest.mark.parametrize(
    "finish", ["FINISH_REASON_STOP", "matched_stop", "<|im_end|>", "FINISH_REASON_MAX_TOKENS"]
)
def test_a_finish_reason_may_have_a_prefix(finish: str) -> None:
    """A bug: every reply of a server with such names counted as filtered."""
    assert outcome_of_body(200, body_of("Paris", finish=finish)).verdict == "ok"


HARMONY = "<|channel|>analysis<|message|>Who?<|end|>"  # of gpt-oss
FINAL = "<|start|>assistant<|channel|>final<|message|>Anna.<|return|>"
SOLUTION = "<|begin_of_solution|>Anna.<|end|>"
TAGS = ("seed:think", "thought", "reasoning", "reflection", "analysis")
FIELDS = st.sampled_from(["error", "choices", "message", "content", "refusal", "usage", "code"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON_VALUES = st.recursive(
    SCALARS, lambda values: st.lists(values) | st.dictionaries(FIELDS, values), max_leaves=10
)
JSON_BODIES = JSON_VALUES.map(lambda value: json.dumps(value).encode())


@settings(max_examples=100)
@given(st.integers(100, 599), st.binary() | JSON_BODIES)
def test_any_response_can_be_classified(status: int, body: bytes) -> None:
    assert outcome_of_body(status, body).verdict in ("ok", "outcome", "failed", "refused")


def test_a_requested_wait_is_honoured_up_to_120_seconds() -> None:
    dates = {seconds: formatdate(NOW + seconds, usegmt=True) for seconds in (20, -20, 500)}
    honoured = {"20": 20, "0.5": 0.5, "120": 120, "121": 120, dates[20]: 20, dates[500]: 120}
    honoured |= {"20s": 20, "121.5s": 120}
    ignored = ["0", "-10", "9" * 35, "inf", "nan", "", "soon", "6 requests", dates[-20], str(int(NOW) - 20)]
    for value, wait in {**honoured, **dict.fromkeys(ignored)}.items():
        assert requested_wait({"retry-after": value}, now=NOW) == wait, value
    assert requested_wait({"retry-after-ms": "1500", "retry-after": "20"}, now=NOW) == 1.5
    assert requested_wait({"x-ms-retry-after-ms": "1500"}, now=NOW) == 1.5


@given(st.text())
def test_any_retry_after_header_can_be_parsed(value: str) -> None:
    wait = requested_wait({"retry-after": value, "retry-after-ms": value}, now=NOW)
    assert wait is None or 0 < wait <= 120


def test_back_off_has_full_jitter_under_a_doubling_limit() -> None:
    rng = random.Random(0)
    for failures, limit in enumerate((0.5, 1, 2, 4, 8, 16, 30, 30), start=1):
        waits = [back_off(failures, rng) for _ in range(500)]
        assert 0 <= min(waits) < 0.05 * limit and 0.95 * limit < max(waits) <= limit


@pytest.mark.parametrize(
    ("written", "finish", "reasoning", "reply", "label"),
    [
        (" Anna. ", "stop", "", " Anna. ", ""),
        ("<think>\nWho?\n</think>\n\nAnna.", "stop", "Who?", "Anna.", ""),
        ("Who?\n</think>\n\nAnna.", "stop", "Who?", "Anna.", ""),  # the chat template opens the block
        ("Who? </think>\nAnna.", "stop", "Who?", "Anna.", ""),
        ("Who?</think>Anna.", "stop", "Who?", "Anna.", ""),
        ("</think>\n\nAnna.", "stop", "", "Anna.", ""),
        ("It ends with </think>\nor so.", "stop", "", "It ends with </think>\nor so.", ""),
        ("As in\n<think>\n</think>\nso.", "stop", "", "As in\n<think>\n</think>\nso.", ""),
        ("Close it with </think> in the text.", "stop", "", "Close it with </think> in the text.", ""),
        ("[THINK]Who?[/THINK]Anna.", "stop", "Who?", "Anna.", ""),  # Mistral
        ("<Thinking>Who?</Thinking>Anna.", "stop", "Who?", "Anna.", ""),
        *((f"<{tag}>Who?</{tag}>Anna.", "stop", "Who?", "Anna.", "") for tag in TAGS),
        ('<think duration="3">Who?</think>Anna.', "stop", "Who?", "Anna.", ""),
        ("<|begin_of_thought|>Who?<|end_of_thought|>Anna.", "stop", "Who?", "Anna.", ""),
        ("<|START_THINKING|>Who?<|END_THINKING|>Anna.", "stop", "Who?", "Anna.", ""),
        ("<|start_thought|>Who?<|end_thought|>" + SOLUTION, "stop", "Who?", "Anna.", ""),
        ("◁think▷Who?◁/think▷Anna.", "stop", "Who?", "Anna.", ""),  # Kimi
        ("<think>\n</think>\n<think>Who?</think>Anna.", "stop", "Who?", "Anna.", ""),
        ("<thoughtful> Anna.", "stop", "", "<thoughtful> Anna.", ""),
        ("analysisWho?assistantfinalAnna.", "stop", "analysisWho?", "Anna.", ""),
        ("<|channel|>final<|message|>Anna.<|return|>", "stop", "", "Anna.", ""),
        ("<|start|>assistant" + HARMONY + FINAL, "stop", HARMONY, "Anna.", ""),
        (HARMONY + FINAL, "stop", HARMONY, "Anna.", ""),
        (HARMONY, "length", HARMONY, "", "length"),
        ("\n<think>\nWho could", "length", "Who could", "", "length"),
        ("<think>Who?</think>", "stop", "Who?", "", "empty"),
    ],
)
def test_the_thinking_of_a_server_without_a_reasoning_parser_is_not_part_of_the_reply(
    written, finish, reasoning, reply, label
):
    outcome = without_thinking(Outcome("ok", text=written, finish=finish))
    assert (outcome.text, outcome.label) == (reply, label)
    assert outcome.reasoning == reasoning or (reasoning == HARMONY and "Who?" in outcome.reasoning)
    assert outcome.verdict == ("outcome" if label else "ok")


@pytest.mark.parametrize(
    ("body", "blamed"),
    [
        ({"detail": [{"loc": ["body", "top"], "msg": "not allowed", "input": "temperature?"}]}, "body.top"),
        (error_of("odd", param="top_p", code="unsupported_value"), "top_p"),
        (error_of("Unrecognized argument: top_k"), "Unrecognized argument: top_k"),
        (error_of("temperature must be between 0 and 0.5", param="temperature"), ""),
        ({"detail": [{"loc": ["body", "top_p"], "msg": "Input should be at most 1"}]}, ""),
        (error_of("'stop' is not supported"), "'stop' is not supported"),
    ],
)
def test_a_rejected_field_is_looked_for_in_place_and_message_only(body, blamed):
    """A bug: a 422 that echoed the question dropped `temperature` for the whole run."""
    assert classify_body(422, body).blamed == blamed


def test_a_word_of_a_reply_is_no_error_code():
    body = body_of("Paris") | {"detail": "insufficient_quota is an error code"}
    assert outcome_of_body(200, body).text == "Paris"
