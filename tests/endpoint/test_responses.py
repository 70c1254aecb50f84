"""What a response means, and how long to wait. No network, no clock."""

import json
import random
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompt_r1.endpoint.responses import Outcome, back_off, requested_wait
from tests.providers import NOW, body_of, error_of, judge


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Paris", "Paris"),
        ([{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris"}], "Paris"),
        (["Pa", {"type": "image_url", "image_url": {}}, "ris"], "Paris"),
        ("Pa\ud800ris\0", "Pa?ris"),
    ],
)
def test_text_and_lists_of_parts_are_replies(content: object, text: str) -> None:
    assert judge(200, body_of(content)) == Outcome("ok", text=text, finish="stop")


def test_reasoning_is_recorded_and_never_the_reply() -> None:
    outcome = judge(200, body_of("Paris", reasoning_content="The Louvre …"))
    assert (outcome.text, outcome.reasoning) == ("Paris", "The Louvre …")
    assert judge(200, body_of(None, reasoning="The Louvre …")).verdict == "retry"


@pytest.mark.parametrize(
    ("status", "body", "label", "text"),
    [
        (200, body_of(None, refusal="I cannot help."), "refusal", "I cannot help."),
        (200, body_of("", finish="content_filter"), "content_filter", ""),
        (200, body_of("", finish="length"), "length", ""),
        (400, error_of("too long", code="context_length_exceeded"), "context_length", ""),
        (400, error_of("maximum context length is 4096 tokens, max_tokens 9"), "context_length", ""),
        (413, b"", "context_length", ""),
        (400, error_of("filtered", code="content_filter"), "content_filter", ""),
    ],
)
def test_what_the_environment_did_itself_is_kept(status: int, body: object, label: str, text: str) -> None:
    outcome = judge(status, body)
    assert (outcome.verdict, outcome.label, outcome.text) == ("outcome", label, text)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((status, b"") for status in (408, 409, 425, 429, 500, 502, 503, 504, 529)),
        (200, error_of("Provider returned error", code=502)),
        (200, {"choices": []}),
        (200, {"choices": [None]}),
        (200, {"choices": "none"}),
        (200, {}),
        (200, []),
        (200, b""),
        (200, b"<html><body>Bad gateway</body></html>"),
        (200, json.dumps(body_of()).encode()[:-9]),
        (200, b"[" * 100_000),
        (200, b"\xff\xfe\x00"),
        (200, body_of(None)),
        (200, body_of("  \n")),
        (200, body_of({"text": 3})),
        (200, body_of(None, finish="tool_calls")),
    ],
)
def test_what_may_pass_is_tried_again(status: int, body: object) -> None:
    assert judge(status, body).verdict == "retry"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, error_of("Incorrect API key"), "Incorrect API key"),
        (402, {"error": "Payment required"}, "credit"),
        (403, {"message": "Not in your country"}, "Not in your country"),
        (404, error_of("The model `larg` does not exist", code="model_not_found"), "`larg`"),
        (404, b"<html>nginx</html>", "base URL"),
        (429, error_of("You exceeded your current quota", code="insufficient_quota"), "quota"),
        (400, [error_of("API key not valid")], "API key not valid"),
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}, "Field required"),
        (301, b"", "301"),
    ],
)
def test_what_cannot_pass_is_fatal_in_the_provider_s_words(status: int, body: object, words: str) -> None:
    outcome = judge(status, body)
    assert outcome.verdict == "fatal" and words in outcome.reason


@given(st.integers(100, 599), st.binary() | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["error", "choices", "message", "content", "refusal", "usage", "code"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_response_makes_the_client_stumble(status: int, body: bytes) -> None:
    assert judge(status, body).verdict in ("ok", "outcome", "retry", "fatal")


# --- Waiting ---


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("20", 20), ("0.5", 0.5), ("120", 120), ("0", None), ("-10", None), ("121", None), ("9" * 35, None),
        ("inf", None), ("nan", None), ("", None), ("soon", None),
        (formatdate(NOW + 20, usegmt=True), 20), (formatdate(NOW - 20, usegmt=True), None),
        (formatdate(NOW + 500, usegmt=True), None), ("Mon, 99 Nov 99999 99:99:99 GMT", None),
    ],
)  # fmt: skip
def test_retry_after_is_honoured_where_it_can_be_believed(value: str, wait: float | None) -> None:
    assert requested_wait({"retry-after": value}, now=NOW) == wait


def test_milliseconds_go_before_seconds() -> None:
    assert requested_wait({"retry-after-ms": "1500", "retry-after": "20"}, now=NOW) == 1.5
    assert requested_wait({"retry-after-ms": "nan", "retry-after": "20"}, now=NOW) == 20


@given(st.text())
def test_no_header_makes_the_client_stumble(value: str) -> None:
    wait = requested_wait({"retry-after": value, "retry-after-ms": value}, now=NOW)
    assert wait is None or 0 < wait <= 120


def test_back_off_has_full_jitter_under_a_doubling_limit() -> None:
    rng = random.Random(0)
    for failures, limit in enumerate((0.5, 1, 2, 4, 8, 16, 30, 30), start=1):
        waits = [back_off(failures, rng) for _ in range(500)]
        assert 0 <= min(waits) < 0.05 * limit and 0.95 * limit < max(waits) <= limit
