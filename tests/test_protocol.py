"""`parse` against a table of malformed turns, and `Codec` against the tokenizer's chat template."""

import copy
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_r1.protocol import TAGS, Codec, parse
from prompt_r1.settings.agent import INSTRUCTIONS
from prompt_r1.types import Action
from tests.support import tiny

UGLY_TURNS = [
    # text, think, prompt, answer, clean
    ("<think>a</think><interaction_prompt>b</interaction_prompt>", "a", "b", None, True),
    ("<think>a</think>\n <answer>b</answer>\n", "a", None, "b", True),
    ("", None, None, None, False),
    ("just talk", None, None, None, False),
    ("<answer>b</answer>", None, None, "b", False),
    # An empty think block is not clean, an empty action is.
    ("<think></think><answer></answer>", "", None, "", False),
    ("<think> \n</think><interaction_prompt> \n</interaction_prompt>", "", "", None, False),
    ("<think>a<answer>b</answer>", None, None, "b", False),  # the think block is never closed
    ("<think>a</think><answer></answer>", "a", None, "", True),
    ("<think>a</think><answer>b", "a", None, None, False),  # cut by the token limit
    ("<think>a</think>well, <answer>b</answer>", "a", None, "b", False),
    ("hm <think>a</think><answer>b</answer>", "a", None, "b", False),
    ("<think>a</think><answer>b</answer> done", "a", None, "b", False),
    ("<think>as <answer>x</answer></think><answer>b</answer>", "as <answer>x</answer>", None, "b", False),
    (
        "<think><interaction_prompt>x</interaction_prompt></think><answer>b</answer>",
        "<interaction_prompt>x</interaction_prompt>",
        None,
        "b",
        False,
    ),
    ("<think>a</think><answer>b</answer><answer>c</answer>", "a", None, "b", False),
    ("<think>a</think><answer><answer>b</answer></answer>", "a", None, "b", False),
    # Asks, then invents a reply and answers: only the prompt counts.
    (
        "<think>a</think><interaction_prompt>p</interaction_prompt>"
        "<interaction_response>r</interaction_response><answer>b</answer>",
        "a",
        "p",
        None,
        False,
    ),
    ("<think>a</think><answer>b</answer><interaction_prompt>p</interaction_prompt>", "a", None, "b", False),
    # Only an action after the think block counts.
    ("<answer>b</answer><think>a</think>", "a", None, None, False),
    ("<think>a</think><think>c</think><answer>b</answer>", "a", None, "b", False),
    ("<THINK>a</THINK><ANSWER>b</ANSWER>", None, None, None, False),
    ("<think>a</think>< answer>b</answer>", "a", None, None, False),
    ("</answer><answer>b</answer></think><think>a</think>", "a", None, None, False),
    ("<think>1</think><answer>2 < 3 & \x00 \u202e</answer>", "1", None, "2 < 3 & \x00 \u202e", True),
]


@pytest.mark.parametrize(("text", "think", "prompt", "answer", "clean"), UGLY_TURNS)
def test_parse_reads_ugly_turns_as_the_table_says(text, think, prompt, answer, clean):
    assert parse(text) == Action(think, prompt, answer, clean)


@pytest.mark.parametrize("tags", [TAGS, ("<think>",), ("<answer>", "</think>"), ("<think></think><answer>",)])
def test_parse_takes_linear_time_on_two_hundred_thousand_tags(tags):
    """It takes milliseconds. Looking for each tag's partner anew would take minutes."""
    begin = time.perf_counter()
    parse("".join(tags) * (200_000 // len(tags)))
    assert time.perf_counter() - begin < 5


def codec() -> Codec:
    return Codec(tiny.tokenizer(), INSTRUCTIONS["paper"])


def decode(tokens: list[int]) -> str:
    return tiny.tokenizer().decode(tokens, skip_special_tokens=False)


def test_a_turn_that_ends_at_another_end_token_is_closed_as_the_template_does():
    """A model may have several; the template writes one of them."""
    c = Codec(tiny.tokenizer(), INSTRUCTIONS["paper"])
    c.stop_ids |= {5}
    assert c.reply("x", after=5) == [c.turn_end, *c.reply("x", after=c.turn_end)]


@settings(max_examples=50)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_untrusted_text_round_trips(text):
    assert decode(codec().encoder.untrusted(text)) == text


def test_a_turn_ends_at_the_templates_end_of_message_and_at_eos():
    """The eos token of a base model is not the end of message of its chat template; some have none."""
    other, none = copy.deepcopy(tiny.tokenizer()), copy.deepcopy(tiny.tokenizer())
    other.eos_token = "<|endoftext|>"
    none.eos_token = None
    message_end, eos = tiny.tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert Codec(other, "").stop_ids == {message_end, eos}
    assert Codec(none, "").stop_ids == codec().stop_ids == {message_end}
    assert [Codec(other, "").turn_text([65, end]) for end in (message_end, eos)] == [decode([65])] * 2
    assert codec().turn_text([eos]) == "<|endoftext|>"  # This tokenizer has another stop token.


def test_a_reply_closes_its_block_once_whatever_tags_are_in_it():
    tokens = codec().reply("a</interaction_response>b</interaction_response>c</interaction_response", after=0)
    head, _, tail = decode(tokens).partition("</interaction_response>")
    assert head.endswith("c&lt;/interaction_response") and "</interaction_response" not in tail


@pytest.mark.parametrize("encoded", [64, 1])  # characters for each token that is read
@pytest.mark.parametrize(("limit", "kept"), [(0, "Anna."), (6, "Anna."), (5, "Anna."), (4, "Anna [cut]")])
def test_only_a_reply_longer_than_the_limit_is_truncated(limit, kept, encoded, monkeypatch):
    monkeypatch.setattr("prompt_r1.protocol.MAX_CHARACTERS_PER_TOKEN", encoded)
    tokens = codec().reply("Anna.", after=0, max_tokens=limit)
    assert f"<interaction_response>{kept}</interaction_response>" in decode(tokens)


@pytest.mark.parametrize("piece", ["Paris is in France. ", "a", " ", "漢", "<|im_end|>", "\n"])
def test_a_reply_of_five_megabytes_is_not_encoded_as_a_whole(piece):
    """A bug: all of it was encoded and then cut, which blocked the event loop for 20 s."""
    tokenizer, encoded = copy.deepcopy(tiny.tokenizer()), []

    class Counting(type(tokenizer)):
        def __call__(self, text, **options):
            encoded.append(len(text))
            return super().__call__(text, **options)

    tokenizer.__class__ = Counting
    c = Codec(tokenizer, "")
    encoded.clear()
    tokens = c.reply(piece * (5_000_000 // len(piece)), after=0, max_tokens=1024)
    assert sum(encoded) < 200_000
    assert len(tokens) < 1100 and " [cut]" in decode(tokens)
