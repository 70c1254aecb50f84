"""The protocol of the game: instruction, tags, `parse`, and the `Codec` between text and tokens.

Two rules keep training correct. Tokens are append-only: a turn is encoded once and never rendered again. And
text from outside (questions, replies) is encoded separately from our own frame of roles, tags and
instruction, so that it can never become a control token.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from prompt_r1.errors import UsageError
from prompt_r1.types import Action, Message

if TYPE_CHECKING:  # `--help` reads this file, and transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

PAPER_INSTRUCTION = """\
First, provide a simple explanation of the question and give it to the large language model for a more \
accurate answer. Focus on explaining the question without deep reasoning in the first step. After \
receiving the response, think about the large language model's response, and by interacting with the large\
 language model again and again, arrive at the final answer. Proceed step by step with the following \
rules:
1. Only in the first step, provide a brief explanation of the question and give it to the large language \
model:
   <think>(Brief thinking must not be over 80 words)</think>
   <interaction_prompt>(give the question and its explanation to the large language \
model)</interaction_prompt>
2. After the first step, in each interaction with the large language model, write:
   <think>(your reasoning for the receiving response and question)</think>
   <interaction_prompt>(new request to refine or validate the answer)</interaction_prompt>
3. Each <interaction_prompt> must build on what came before. Do not just repeat the same content. Let the \
content of the <interaction_prompt>...</interaction_prompt> evolve naturally (for example: outline → add \
details → refine → check).\N{SPACE}
4. Continue producing think within <think></think> and call tool within \
<interaction_prompt></interaction_prompt> until the answer is ready.
5. Once the answer is complete, write:
   <think>(final reasoning with the <interaction_response> and question)</think>
   <answer>(final answer for the question)</answer>"""

ANSWER_IN_TAGS = "Write the final answer, and nothing but the final answer, between <answer> and </answer>."

INSTRUCTIONS = {
    # Table 1 of the paper, and byte for byte the end of the published prompts.
    "paper": PAPER_INSTRUCTION,
    # The release's inference settings and figure 7 of the paper.
    "paper-50": PAPER_INSTRUCTION.replace(
        "Brief thinking must not be over 80 words", "don't think deeply and no more than 50 words"
    ),
    # For the mini agent: half a million parameters cannot follow the paper's instruction.
    "short": "Ask the assistant step by step, then answer.",
    # For an agent without environment: the form of the paper's last step.
    "alone": """\
Think about the question, then answer it. Write:
   <think>(your reasoning)</think>
   <answer>(final answer for the question)</answer>""",
    # For supervised fine-tuning; methods that ask an environment once use the same sentence.
    "answer": ANSWER_IN_TAGS,
}

ENVIRONMENT_SYSTEM = (
    "You are a helpful assistant. Please read the provided content (including previous conversations and "
    "the current task) and help the user complete the task or answer the question. "
)

LAST_TURN = "This is your last turn: answer now."  # for --force-answer; not in the paper
LONGEST_CACHED = 16_384  # characters of a text whose tokens are cached: 256 of them take at most 170 MB
CHARACTERS_PER_TOKEN = 8  # more than usual; only for the first guess at how much of a long reply to encode
# Cutting a text changes the tokens of its last word at most, or the last few tokens of an endless word.
TOKENS_OF_A_WORD = 256
CUT = " [cut]"  # appended to a reply of which the agent sees only the beginning

TAGS = tuple(
    f"<{slash}{name}>"
    for name in ("think", "interaction_prompt", "interaction_response", "answer")
    for slash in ("", "/")
)

ACTION_ENDS = ("</interaction_prompt>", "</answer>")  # with --stop-tags, a turn ends here


def parse(text: str) -> Action:
    """Read one turn of the agent, in time linear in its length.

    The think block is the first one. The action is the first complete prompt or answer block after it. A
    block ends at its first closing tag and begins at the last opening tag before that. `text` must be the
    agent's own: tags in a reply of the environment mean nothing.
    """
    think, think_end = _block(text, "think", 0)
    prompt, prompt_end = _block(text, "interaction_prompt", think_end)
    answer, answer_end = _block(text, "answer", think_end)
    if prompt is not None and answer is not None:  # the one that is complete first counts
        if prompt_end < answer_end:
            answer = None
        else:
            prompt = None
    if prompt is not None:
        clean = _is_clean(text, think, "interaction_prompt", prompt)
    else:
        clean = _is_clean(text, think, "answer", answer)
    return Action(think, prompt, answer, clean)


def _block(text: str, name: str, start: int) -> tuple[str | None, int]:
    """The stripped content of the first complete <name> block at or after `start`, and its end.

    (None, `start`) if there is no such block.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    first = text.find(opening, start)
    close = text.find(closing, first + len(opening)) if first >= 0 else -1
    if close < 0:
        return None, start
    return text[text.rfind(opening, start, close) + len(opening) : close].strip(), close + len(closing)


def _is_clean(text: str, think: str | None, name: str, content: str | None) -> bool:
    """Whether the turn is `<think>…</think>`, then `<name>…</name>`, and nothing else, not even a tag."""
    if think is None or content is None:
        return False
    text = text.strip()
    order = ["<think>", "</think>", f"<{name}>", f"</{name}>"]
    positions = [text.find(tag) for tag in order]
    return (
        all(text.count(tag) == (tag in order) for tag in TAGS)
        and positions == sorted(positions)
        and text.startswith("<think>")
        and text.endswith(f"</{name}>")
        and not text[positions[1] + len("</think>") : positions[2]].strip()
    )


class UntrustedEncoder:
    """Encodes text from outside without any added token of the vocabulary (`<think>`, `<|im_end|>`).

    `split_special_tokens=True` is not enough: it keeps added tokens with special=False, such as Qwen3's
    `<think>`. So the text is cut inside each of their names, and the pieces are encoded one by one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        added = sorted((t.content for t in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        names = "|".join(re.escape(name) for name in added if len(name) > 1)
        # A lookahead finds overlapping names too; (?!) matches nowhere.
        self._control = re.compile(f"(?={names})" if names else "(?!)")

    def __call__(self, text: str) -> list[int]:
        # Lone surrogates cannot be encoded as UTF-8; they become "?".
        text = text.encode("utf-8", "replace").decode("utf-8")
        cuts = [0, *(match.start() + 1 for match in self._control.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts) if start < end]
        return [t for piece in pieces for t in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]


class Codec:
    """Between text and tokens of one turn, for any Hugging Face tokenizer with a ChatML-like chat template.

    Only new text is ever encoded. Our own frame (roles, tags, instruction) may use control tokens; text from
    outside goes through `encode_untrusted`.

    Raises UsageError if the tokenizer's chat template cannot be used.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", instruction: str) -> None:
        self.tokenizer = tokenizer
        frame = _frame_of(tokenizer)
        self._generation = frame.generation
        turn_end, *to_user = self._encode(frame.between)
        self.turn_end: int = turn_end
        self.stop_ids: frozenset[int] = frozenset({turn_end, tokenizer.eos_token_id} - {None})
        self._opening_head = self._encode(frame.before_user + "Question:")
        self._reply_head = to_user + self._encode("<interaction_response>")
        self._encoder = UntrustedEncoder(tokenizer)
        # The games of a question share its text, and often the replies.
        self._cached_encoder = lru_cache(maxsize=256)(self._encoder)
        # The instruction is long, and there are only two notes: none, and LAST_TURN.
        self._opening_tail = cache(lambda note: self._encode("\n" + instruction + self._ending(note)))
        self._reply_tail = cache(lambda note: self._encode("</interaction_response>" + self._ending(note)))

    def opening(self, question: str, *, note: str = "") -> list[int]:
        """The tokens of the first user message, with question and instruction, up to the agent's turn."""
        return self._opening_head + self.encode_untrusted(" " + question) + self._opening_tail(note)

    def reply(self, text: str, *, after: int, max_tokens: int = 0, note: str = "") -> list[int]:
        """The tokens of the environment's reply as the next user message, up to the agent's turn.

        `after` is the last token of the dialogue so far: a message that the agent left open is closed here.
        A reply of more than `max_tokens` tokens (0: no limit) is cut and marked. `note` is a sentence of ours
        below the reply.
        """
        close = [] if after == self.turn_end else [self.turn_end]
        text = text.replace("</interaction_response", "&lt;/interaction_response")  # may not close our frame
        content = self._encode_beginning(text, max_tokens) if max_tokens else self.encode_untrusted(text)
        if max_tokens and len(content) > max_tokens:
            content = self._whole_characters(content[:max_tokens]) + self._encode(CUT)
        return close + self._reply_head + content + self._reply_tail(note)

    def encode_untrusted(self, text: str) -> list[int]:
        """The tokens of text from outside, none of them an added token of the vocabulary."""
        return self._cached_encoder(text) if len(text) <= LONGEST_CACHED else self._encoder(text)

    def _encode_beginning(self, text: str, max_tokens: int) -> list[int]:
        """Tokens of a text: all, or of a long one more than `max_tokens`, of which that many are exact.

        Replies may have megabytes, which take seconds to encode.
        """
        needed = max_tokens + TOKENS_OF_A_WORD
        length = needed * CHARACTERS_PER_TOKEN
        while length < len(text):
            tokens = self.encode_untrusted(text[:length])
            if len(tokens) >= needed:
                return tokens
            length *= 4
        return self.encode_untrusted(text)

    def _ending(self, note: str) -> str:
        return ("\n" + note if note else "") + self._generation

    def _whole_characters(self, tokens: list[int]) -> list[int]:
        """The tokens without a partial character at the end (at most 3 bytes, so at most 3 tokens)."""
        for end in range(len(tokens), max(len(tokens) - 4, 0), -1):
            if not text_of(self.tokenizer, tokens[:end]).endswith("\ufffd"):
                return tokens[:end]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The agent's text of one turn, without the stop token at the end."""
        stopped = bool(tokens) and tokens[-1] in self.stop_ids
        return text_of(self.tokenizer, tokens[:-1] if stopped else tokens)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def text_of(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    """The text of a row of tokens exactly as it stands, control tokens included."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "several texts from one row of tokens"
    return text


def render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> str:
    """A dialogue in the chat template, up to the assistant's next turn."""
    dialogue = [{"role": message["role"], "content": message["content"]} for message in messages]
    text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str), "several texts from one dialogue"
    return text


@dataclass(frozen=True)
class _Frame:
    """The text that a chat template writes around messages."""

    before_user: str  # before the first user message
    between: str  # from the end of an assistant message to the next user message
    generation: str  # from the end of a user message to the assistant's turn


def _frame_of(tokenizer: "PreTrainedTokenizerBase") -> _Frame:
    """Find the frame by rendering marked messages. Raises UsageError for a template that has none."""
    where = f"the tokenizer {tokenizer.name_or_path!r}"
    if not tokenizer.chat_template:
        raise UsageError(
            f"{where} has no chat template: give it one (chat_template.jinja) or use an instruct model"
        )
    marks = ["\u2402first\u2402", "\u2402second\u2402", "\u2402third\u2402"]
    messages: list[Message] = [
        {"role": "user", "content": marks[0]},
        {"role": "assistant", "content": marks[1]},
        {"role": "user", "content": marks[2]},
    ]
    opening, dialogue = render(tokenizer, messages[:1]), render(tokenizer, messages)
    positions = [dialogue.find(mark) for mark in marks]
    if min(positions) < 0 or positions != sorted(positions) or opening.count(marks[0]) != 1:
        raise UsageError(
            f"the chat template of {where} does not keep the messages' texts in order: not supported"
        )
    before_user, generation = opening.split(marks[0])
    between = dialogue[positions[1] + len(marks[1]) : positions[2]]
    if not dialogue.endswith(marks[2] + generation) or not dialogue.startswith(before_user):
        raise UsageError(
            f"the chat template of {where} changes earlier messages when new ones come: not supported"
        )
    return _Frame(before_user, between, generation)
