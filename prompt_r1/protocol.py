"""The language of the game: instruction, tags, `parse`, and `Codec` between text and tokens of a turn.

Two rules make training safe. Tokens are append-only: a turn is encoded once and never rendered again. And
text that we did not write (questions, replies) is encoded apart from our frame, so that it can never become a
control token.
"""

import re
from collections.abc import Sequence
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
    # Table 1 of the paper; the published data end with it byte for byte.
    "paper": PAPER_INSTRUCTION,
    # The release's inference settings and figure 7 of the paper.
    "paper-50": PAPER_INSTRUCTION.replace(
        "Brief thinking must not be over 80 words", "don't think deeply and no more than 50 words"
    ),
    # One sentence: an agent of half a million parameters cannot digest the paper's.
    "short": "Ask the assistant step by step, then answer.",
    # For an agent without environment: the form of the paper's last step.
    "alone": """\
Think about the question, then answer it. Write:
   <think>(your reasoning)</think>
   <answer>(final answer for the question)</answer>""",
    # Supervised fine-tuning; methods that ask an environment once say the same.
    "answer": ANSWER_IN_TAGS,
}

ENVIRONMENT_SYSTEM = (
    "You are a helpful assistant. Please read the provided content (including previous conversations and "
    "the current task) and help the user complete the task or answer the question. "
)

LAST_TURN = "This is your last turn: answer now."  # --force-answer; the paper has no such sentence
CUT = " [cut]"  # ends a reply of which the agent sees only the beginning

TAGS = tuple(
    f"<{slash}{name}>"
    for name in ("think", "interaction_prompt", "interaction_response", "answer")
    for slash in ("", "/")
)


ACTION_ENDS = ("</interaction_prompt>", "</answer>")  # where a turn may be stopped


def parse(text: str) -> Action:
    """Read one turn of the agent, in time linear in its length.

    The think block is the first one. The action is the first complete prompt or answer block after it. A
    block ends at its first closing tag and begins at the last opening tag before that. Hand it the agent's
    own text only: tags in a reply of the environment mean nothing.
    """
    think, end = _block(text, "think", 0)
    found = [
        (stop, name, content)
        for name in ("interaction_prompt", "answer")
        for content, stop in [_block(text, name, end)]
        if content is not None
    ]
    _, name, content = min(found, default=(0, "", None))
    return Action(
        think=think,
        prompt=content if name == "interaction_prompt" else None,
        answer=content if name == "answer" else None,
        clean=_is_clean(text, think, name, content),
    )


def _block(text: str, name: str, start: int) -> tuple[str | None, int]:
    """The stripped content of the first complete <name> block at or after `start`, and where it ends."""
    opening, closing = f"<{name}>", f"</{name}>"
    first = text.find(opening, start)
    close = text.find(closing, first + len(opening)) if first >= 0 else -1
    if close < 0:
        return None, start
    return text[text.rfind(opening, start, close) + len(opening) : close].strip(), close + len(closing)


def _is_clean(text: str, think: str | None, name: str, content: str | None) -> bool:
    """Is the turn `<think>…</think>`, then `<name>…</name>`, and nothing else, with no other tag inside?"""
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
    """Tokens of a text from outside, none of them an added token of the vocabulary (`<think>`, `<|im_end|>`).

    `split_special_tokens=True` is not enough: it leaves added tokens with special=False, as Qwen3's
    `<think>`, whole. So the text is cut inside each of their names and the pieces are encoded one by one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        added = sorted((t.content for t in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        names = "|".join(re.escape(name) for name in added if len(name) > 1)
        # A lookahead, so that overlapping tokens are all found; (?!) matches nowhere.
        self._control = re.compile(f"(?={names})" if names else "(?!)")

    def __call__(self, text: str) -> list[int]:
        # Lone surrogates cannot be encoded as UTF-8; they become "?".
        text = text.encode("utf-8", "replace").decode("utf-8")
        cuts = [0, *(match.start() + 1 for match in self._control.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts) if start < end]
        return [t for piece in pieces for t in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]


class Codec:
    """Text ↔ tokens of one turn, for any Hugging Face tokenizer with a ChatML-like chat template.

    Only what is new is ever rendered. Our own frame (roles, tags, instruction) is encoded as the tokenizer
    likes; text from outside goes through `encode_untrusted`.

    Raises UsageError where the tokenizer's chat template cannot be used.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", instruction: str) -> None:
        self.tokenizer = tokenizer
        before_user, between, self._generation = _frame_of(tokenizer)
        turn_end, *to_user = self._encode(between)
        self.turn_end: int = turn_end
        self.stop_ids: frozenset[int] = frozenset({turn_end, tokenizer.eos_token_id} - {None})
        self._opening_head = self._encode(before_user + "Question:")
        self._reply_head = to_user + self._encode("<interaction_response>")
        # The games of a question share it, and often what they are told.
        self.encode_untrusted = lru_cache(maxsize=256)(UntrustedEncoder(tokenizer))
        # By note; there are two of them, and the instruction is long.
        self._opening_tail = cache(lambda note: self._encode("\n" + instruction + self._ending(note)))
        self._reply_tail = cache(lambda note: self._encode("</interaction_response>" + self._ending(note)))

    def opening(self, question: str, *, note: str = "") -> list[int]:
        """The first user message, question and instruction, up to where the agent begins to write."""
        return self._opening_head + self.encode_untrusted(" " + question) + self._opening_tail(note)

    def reply(self, text: str, *, after: int, max_tokens: int = 0, note: str = "") -> list[int]:
        """The environment's reply as the next user message. `after` is the last token of the dialogue so far:
        the agent's message is closed here when the agent did not close it itself.

        Of a reply of more than `max_tokens` tokens (0: no limit) the first ones stay, and a mark. `note` is a
        sentence of ours below the reply.
        """
        close = [] if after == self.turn_end else [self.turn_end]
        text = text.replace("</interaction_response", "&lt;/interaction_response")  # may not close our frame
        content = self.encode_untrusted(text)
        if max_tokens and len(content) > max_tokens:
            content = self._whole_characters(content[:max_tokens]) + self._encode(CUT)
        return close + self._reply_head + content + self._reply_tail(note)

    def _ending(self, note: str) -> str:
        return ("\n" + note if note else "") + self._generation

    def _whole_characters(self, tokens: list[int]) -> list[int]:
        """The tokens without those at the end that hold only a part of a character (at most 3 bytes do)."""
        for end in range(len(tokens), max(len(tokens) - 4, 0), -1):
            if not text_of(self.tokenizer, tokens[:end]).endswith("\ufffd"):
                return tokens[:end]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The agent's text of one turn: everything it wrote but the stop token at the end."""
        stopped = bool(tokens) and tokens[-1] in self.stop_ids
        return text_of(self.tokenizer, tokens[:-1] if stopped else tokens)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def text_of(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    """The text of a row of tokens exactly as it was written, control tokens included."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "several texts from one row of tokens"
    return text


def render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> str:
    """A dialogue in the chat template, up to where the agent writes next."""
    dialogue = [{"role": message["role"], "content": message["content"]} for message in messages]
    text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str), "several texts from one dialogue"
    return text


def _frame_of(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str, str]:
    """What the chat template writes before the first user message, between the agent's message and the next
    user message, and after a user message up to where the agent writes.
    """
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
    return before_user, between, generation
