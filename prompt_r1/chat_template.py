"""The text around messages in a chat template, and its encoding.

The template is rendered once, to find its frame. From then on a dialogue only grows: the pieces of a message
are encoded one by one and appended, and together they decode to what the template writes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from prompt_r1.errors import UsageError
from prompt_r1.types import Message

if TYPE_CHECKING:  # `--help` reads this file, and transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

# Templates write this date as today's, so that resumed runs and trained agents keep the prompts of training.
ONE_DAY = "{% macro strftime_now(format) %}1 January 2025{% endmacro %}"


@dataclass(frozen=True)
class Frame:
    """The text that a chat template writes around messages."""

    before_user: str  # before the first user message
    between: str  # from the end of an assistant message to the next user message
    generation: str  # from the end of a user message to the assistant's turn


def opened_think(text: str) -> str:
    """The end of a generation prompt from a <think> that it leaves open; "" if it opens none.

    The templates of DeepSeek-R1's distilled models, Qwen3-Thinking and others open every turn so.
    """
    start = text.rfind("<think>")
    return text[start:] if start > text.rfind("</think>") else ""


def render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> str:
    """A dialogue in the chat template, up to the assistant's next turn.

    Raises UsageError for a template that fails on it.
    """
    dialogue = [{"role": message["role"], "content": message["content"]} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            dialogue,
            chat_template=ONE_DAY + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template is a program of its own: anything can go wrong in it
        reason = " ".join(str(error).split()) or type(error).__name__
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(
            f"the chat template of {name_of(tokenizer)} cannot render a dialogue of {roles} ({reason})"
            ": give the model another chat_template.jinja, or use another model"
        ) from None
    assert isinstance(text, str), "several texts from one dialogue"
    return text


def name_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """How error messages name a tokenizer."""
    return f"the tokenizer {tokenizer.name_or_path!r}"


def frame_of(tokenizer: "PreTrainedTokenizerBase", first_message: str) -> Frame:
    """Find the frame by rendering marked messages, and compare it with the rendered `first_message`.

    Raises UsageError for a template that has none: whose turns differ, or that changes a message.
    """
    where = name_of(tokenizer)
    if not tokenizer.chat_template:
        raise UsageError(
            f"{where} has no chat template: give it one (chat_template.jinja) or use an instruct model"
        )
    marks = [f"\u2402{letter}\u2402" for letter in "abcde"]
    roles: list[Literal["user", "assistant"]] = ["user", "assistant", "user", "assistant", "user"]
    messages: list[Message] = [
        {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
    ]
    text = render(tokenizer, messages)
    mark = re.compile("\u2402.\u2402")
    if mark.findall(text) == marks:
        before_user, _, first_between, _, second_between, generation = mark.split(text)
        frame = Frame(before_user, first_between, generation)
        rendered = render(tokenizer, [{"role": "user", "content": first_message}])
        expected = before_user + first_message + generation
        if first_between == second_between and rendered == expected:
            return frame
    raise UsageError(
        f"the chat template of {where} does not write the same text around every message, or changes the "
        "messages: not supported"
    )


def text_of(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    """The text of tokens as it stands, control tokens included.

    Tokenizers of the sentencepiece kind leave out a space at the beginning.
    """
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "several texts from one row of tokens"
    return text


class PieceEncoder:
    """Encodes the pieces of a dialogue one by one; the joined tokens decode to the joined pieces.

    Tokenizers of the sentencepiece kind write a space before every text. With such a tokenizer, a piece that
    continues a dialogue is encoded behind a control character, whose tokens are then removed.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        # Words, white space and single characters that were added are no control tokens. Nor is unk, which
        # stands for unknown characters.
        control = {
            number: token.content
            for number, token in added.items()
            if token.special or (len(token.content) > 1 and re.search(r"[^\w\s]", token.content))
        }
        names = "|".join(re.escape(name) for name in control.values() if len(name) > 1)
        self._control_ids = control.keys() - {tokenizer.unk_token_id}
        # A lookahead finds overlapping names too; (?!) matches nowhere.
        self._control = re.compile(f"(?={names})" if names else "(?!)")
        joined = text_of(tokenizer, self.start("ab") + self.start("ab"))
        self._guard = "" if joined == text_of(tokenizer, self.start("abab")) else "\x01"
        self._guard_tokens = self.start(self._guard)

    def start(self, text: str) -> list[int]:
        """The tokens of trusted text at the start of a dialogue."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def trusted(self, text: str) -> list[int]:
        """The tokens of trusted text that continues a dialogue. They may be control tokens."""
        tokens, guard = self.start(self._guard + text), self._guard_tokens
        assert tokens[: len(guard)] == guard, f"the tokenizer merges {self._guard!r} with {text[:20]!r}"
        return tokens[len(guard) :]

    def untrusted(self, text: str) -> list[int]:
        """The tokens of text from outside, without control tokens and tags (<|im_end|>, <think>).

        `split_special_tokens=True` is not enough: it keeps added tokens with special=False, such as Qwen3's
        <think>. So the text is cut inside each of their names, and the pieces are encoded one by one.
        """
        # Lone surrogates cannot be encoded as UTF-8; they become "?".
        text = text.encode("utf-8", "replace").decode("utf-8")
        cuts = [match.start() + 1 for match in self._control.finditer(text)]
        tokens: list[int] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            tokens += self._without_control(text[start:end])
        return tokens

    def _without_control(self, piece: str) -> list[int]:
        """The tokens of a piece. A single character that is a control token is left out.

        A normalizer can turn other characters, such as full-width letters, into the name of a control token.
        Then the piece is halved until no name is left.
        """
        tokens = self.trusted(piece)
        if self._control_ids.isdisjoint(tokens):
            return tokens
        middle = len(piece) // 2
        if middle == 0:
            return []
        return self._without_control(piece[:middle]) + self._without_control(piece[middle:])


def find_turn_end(between: list[int], tokenizer: "PreTrainedTokenizerBase", *, known: Sequence[str]) -> int:
    """The index of the token in `between`, the tokens from an assistant's message to the next message, that
    ends the agent's turn; -1: none does.

    Templates end a turn with a control token (<|im_end|>). Skip white space and our own tags (`known`); the
    first control token is the end. If the template writes plain text there ("### User:"), the end is eos.

    Raises UsageError for a tokenizer that has no such token.
    """
    added, eos = tokenizer.added_tokens_decoder, tokenizer.eos_token_id
    for position, token in enumerate(between):
        name = added[token].content if token in added else ""
        if token == eos or (name.strip() and name not in known and token != tokenizer.bos_token_id):
            return position
        if text_of(tokenizer, [token]).strip():
            break
    if eos is None:
        raise UsageError(
            f"the chat template of {name_of(tokenizer)} ends messages without a control token, and there is "
            "no eos token: not supported"
        )
    return between.index(eos) if eos in between else -1
