"""The text around messages in a chat template, and its encoding.

The template is rendered once, to find its frame. From then on a dialogue only grows: the pieces of a message
are encoded one by one and appended. The joined tokens decode to the text that the template would write.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from prompt_r1.errors import UsageError
from prompt_r1.types import Message, Role

if TYPE_CHECKING:  # `--help` reads this file, and the import takes seconds.
    from transformers import PreTrainedTokenizerBase

# Some templates write today's date. This macro gives them a fixed date, so that a resumed run and a trained
# agent get the same prompts as in training.
ONE_DAY = "{% macro strftime_now(format) %}1 January 2025{% endmacro %}"


@dataclass(frozen=True)
class Frame:
    """The text that a chat template writes around messages."""

    before_user: str  # The text before the first user message.
    between: str  # The text from the end of an assistant message to the next user message.
    generation: str  # The text from the end of a user message to the assistant's turn.


def opened_think(text: str) -> str:
    """The end of a generation prompt, from the <think> that it leaves open; "" if it leaves none open.

    The templates of DeepSeek-R1's distilled models, Qwen3-Thinking and others open every turn with a <think>.
    """
    start = text.rfind("<think>")
    return text[start:] if start > text.rfind("</think>") else ""


def render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> str:
    """Write a dialogue in the chat template, up to the assistant's next turn.

    Raises UsageError if the template cannot render this dialogue.
    """
    dialogue = [{"role": message["role"], "content": message["content"]} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            dialogue,
            chat_template=ONE_DAY + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # A template is a program and may raise anything.
        reason = " ".join(str(error).split()) or type(error).__name__
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(
            f"the chat template of {name_of(tokenizer)} cannot render a dialogue of {roles} ({reason})"
            ": give the model another chat_template.jinja, or use another model"
        ) from None
    assert isinstance(text, str), "several texts from one dialogue"
    return text


def parts_of(
    tokenizer: "PreTrainedTokenizerBase", roles: Sequence[Role]
) -> tuple[str, list[tuple[int, str]]]:
    """What a chat template writes around the messages of a dialogue with these roles.

    Returns the text before the first message, and for each message, in the order of the template, its number
    and the text up to the next message.
    """
    # No template writes the characters ␂ and ␃ itself.
    marked: list[Message] = []
    for number, role in enumerate(roles):
        marked.append({"role": role, "content": f"␂{number}␃"})
    # The pieces are the opening, the number of a message, the text after it, the next number, and so on.
    opening, *pieces = re.split("␂(\\d+)␃", render(tokenizer, marked))
    numbers = [int(number) for number in pieces[::2]]
    return opening, list(zip(numbers, pieces[1::2], strict=True))


def name_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """How error messages name a tokenizer."""
    return f"the tokenizer {tokenizer.name_or_path!r}"


def frame_of(tokenizer: "PreTrainedTokenizerBase", first_message: str) -> Frame:
    """Find the frame of a chat template by rendering a dialogue of five messages.

    The frame must also fit a dialogue that has only the user's `first_message`. Raises UsageError for a
    template that has no frame, because it does not write the same text around every message, or changes a
    message.
    """
    where = name_of(tokenizer)
    if not tokenizer.chat_template:
        raise UsageError(
            f"{where} has no chat template: give it one (chat_template.jinja) or use an instruct model"
        )
    no_frame = UsageError(
        f"the chat template of {where} does not write the same text around every message, or changes the "
        "messages: not supported"
    )
    before_user, parts = parts_of(tokenizer, ["user", "assistant", "user", "assistant", "user"])
    if [number for number, _ in parts] != [0, 1, 2, 3, 4]:
        raise no_frame
    # The dialogue is: before_user [0] _ [1] between [2] _ [3] between [4] generation
    # The texts _ are not compared with `generation`, because a template may open a <think> only in
    # `generation`. In a game, `generation` stands before every turn of the agent.
    _, between, _, second_between, generation = [text for _, text in parts]
    rendered = render(tokenizer, [{"role": "user", "content": first_message}])
    if between != second_between or rendered != before_user + first_message + generation:
        raise no_frame
    return Frame(before_user, between, generation)


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    """Decode tokens, control tokens included, without a clean-up of spaces.

    A tokenizer of the sentencepiece kind still drops a space at the beginning of the text.
    """
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "several texts from one row of tokens"
    return text


def encodable(text: str) -> str:
    """Replace lone surrogates by "?". They have no UTF-8, and JSON may hold them."""
    return text.encode("utf-8", "replace").decode("utf-8")


class PieceEncoder:
    """Encodes the pieces of a dialogue one by one. The joined tokens decode to the joined pieces.

    Tokenizers of the sentencepiece kind write a space before every text. With such a tokenizer, a piece that
    continues a dialogue is encoded behind a guard: a control character, whose tokens are then removed.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        # Control tokens are the special tokens, and the added tokens that have punctuation in their name,
        # such as <think>. Other added tokens are ordinary text: words, white space and single characters.
        control: dict[int, str] = {}
        for number, token in tokenizer.added_tokens_decoder.items():
            has_punctuation = re.search(r"[^\w\s]", token.content) is not None
            if token.special or (has_punctuation and len(token.content) > 1):
                control[number] = token.content
        # Untrusted text may become the unk token, which stands for all unknown characters.
        self._control_ids = control.keys() - {tokenizer.unk_token_id}
        # `untrusted` cuts a text within each of these names. A name of one character cannot be cut;
        # `_without_control` drops it from the text.
        names = "|".join(re.escape(name) for name in control.values() if len(name) > 1)
        # A lookahead also finds names that overlap. "(?!)" matches nowhere.
        self._control = re.compile(f"(?={names})" if names else "(?!)")
        # Does the tokenizer write a space before every text? Then "ab" + "ab" decodes to "ab ab".
        two_pieces = decode(tokenizer, self.trusted_start("ab") + self.trusted_start("ab"))
        one_piece = decode(tokenizer, self.trusted_start("abab"))
        needs_guard = two_pieces != one_piece
        self._guard = "\x01" if needs_guard else ""
        self._guard_tokens = self.trusted_start(self._guard)

    def trusted_start(self, text: str) -> list[int]:
        """The tokens of trusted text at the start of a dialogue."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def trusted(self, text: str) -> list[int]:
        """The tokens of trusted text that continues a dialogue. The text may name control tokens."""
        tokens, guard = self.trusted_start(self._guard + text), self._guard_tokens
        assert tokens[: len(guard)] == guard, f"the tokenizer merges {self._guard!r} with {text[:20]!r}"
        return tokens[len(guard) :]

    def untrusted(self, text: str) -> list[int]:
        """The tokens of text from outside, without control tokens such as <|im_end|> or Qwen3's <think>.

        The text is cut inside the name of every control token, and the pieces are encoded one by one.
        `split_special_tokens=True` is not enough, because it keeps added tokens with special=False, such as
        this <think>.
        """
        text = encodable(text)
        cuts = [match.start() + 1 for match in self._control.finditer(text)]
        tokens: list[int] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            tokens += self._without_control(text[start:end])
        return tokens

    def _without_control(self, piece: str) -> list[int]:
        """The tokens of a piece, without control tokens.

        A normalizer can turn other characters, such as full-width letters, into the name of a control token.
        Then the piece is halved until no half makes a control token. A single character that still makes one
        is left out.
        """
        tokens = self.trusted(piece)
        if self._control_ids.isdisjoint(tokens):
            return tokens
        middle = len(piece) // 2
        if middle == 0:
            return []
        return self._without_control(piece[:middle]) + self._without_control(piece[middle:])


def closing_tokens(
    before_reply: list[int], tokenizer: "PreTrainedTokenizerBase", *, not_ends: Sequence[str]
) -> list[int]:
    """The tokens that close the agent's message: the first tokens of `before_reply`, up to an end token.

    `before_reply` are the tokens from the end of the agent's message to the text of the reply. An end token
    is eos, or an added token such as <|im_end|>, but not bos and none of `not_ends`.

    Most templates write an end token first, perhaps after white space. Some write other text first, as in
    "### User:". Then no token closes a message, the result is [], and the agent ends its turns with eos.
    Raises UsageError if such a template has no eos token.
    """
    added, eos = tokenizer.added_tokens_decoder, tokenizer.eos_token_id

    def is_end_token(token: int) -> bool:
        if token == eos:
            return True
        if token not in added or token == tokenizer.bos_token_id:
            return False
        name = added[token].content
        return name.strip() != "" and name not in not_ends

    for position, token in enumerate(before_reply):
        if is_end_token(token):
            return before_reply[: position + 1]
        if decode(tokenizer, [token]).strip():
            break  # Other text comes first.
    if eos is None:
        raise UsageError(
            f"the chat template of {name_of(tokenizer)} ends messages without a control token, and there is "
            "no eos token: not supported"
        )
    return []
