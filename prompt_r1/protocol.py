"""The protocol of the game: instruction, tags, `parse`, and the `Codec` between text and tokens.

Two rules keep training correct:

1. Tokens are append-only. What the agent sampled is never encoded again, and other text is encoded once.
2. Text from outside (questions, replies) is encoded separately from our own frame of roles, tags and
   instruction (`chat_template.Frame`), so that it can never become a control token.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prompt_r1.chat_template import PieceEncoder, find_turn_end, frame_of, name_of, opened_think, text_of
from prompt_r1.errors import UsageError
from prompt_r1.types import Action

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

NO_REPLY = "(no reply)"  # stands for an empty reply, which servers refuse in a dialogue; it earns nothing
CUT = " [cut]"  # appended to a reply if the agent reads only its beginning
# Of a long reply, this many characters are encoded for each token that the agent reads: few tokens have more.
LONGEST_TOKEN = 64

TAGS = tuple(
    f"<{slash}{name}>"
    for name in ("think", "interaction_prompt", "interaction_response", "answer")
    for slash in ("", "/")
)
ANY_TAG = re.compile(f"({'|'.join(TAGS)})")
CLEAN_TURNS = (
    ["<think>", "</think>", "<interaction_prompt>", "</interaction_prompt>"],
    ["<think>", "</think>", "<answer>", "</answer>"],
)


def parse(text: str) -> Action:
    """Read one turn of the agent, in time linear in its length.

    The think block is the first one. The action is the first complete prompt or answer block after it
    (without a think block: anywhere). A block ends at its first closing tag and begins at the last opening
    tag before that. `text` must be the agent's own: tags in a reply of the environment mean nothing.
    """
    think, think_end = _block(text, "think", 0)
    prompt, prompt_end = _block(text, "interaction_prompt", think_end)
    answer, answer_end = _block(text, "answer", think_end)
    if prompt is not None and answer is not None:  # the block that is complete first counts
        if prompt_end < answer_end:
            answer = None
        else:
            prompt = None
    return Action(think, prompt, answer, clean=bool(think) and _is_clean(text))


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


def _is_clean(text: str) -> bool:
    """Whether the turn is a think block, then a prompt or an answer, and nothing else, not even a tag."""
    pieces = ANY_TAG.split(text, maxsplit=5)  # text, tag, text, tag, …; a fifth tag is one too many
    texts, tags = pieces[::2], pieces[1::2]
    if tags not in CLEAN_TURNS:
        return False
    before, _think, between, _action, after = texts
    return not (before + between + after).strip()


class Codec:
    """Between text and tokens of one turn, for any Hugging Face tokenizer whose chat template has a frame.

    Only new text is ever encoded. Our own frame (roles, tags, instruction) may use control tokens; text from
    outside goes through `PieceEncoder.untrusted`.

    Raises UsageError if the tokenizer or its chat template cannot be used.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", instruction: str) -> None:
        self.tokenizer = tokenizer
        self.frame = frame_of(tokenizer, f"Question: Who?\n{instruction}")
        # The <think> that the template itself writes at the start of every turn of the agent, or "".
        self.opened = opened_think(self.frame.generation)
        self.encoder = PieceEncoder(tokenizer)
        between = self.encoder.trusted(self.frame.between + "<interaction_response>")
        end = find_turn_end(between, tokenizer, known=TAGS)
        self.turn_end: int = between[end] if end >= 0 else tokenizer.eos_token_id
        self.stop_ids: frozenset[int] = frozenset({self.turn_end, tokenizer.eos_token_id} - {None})
        # A message that the agent left open is closed with the template's white space and end token.
        self._close = between[: end + 1]
        self._reply_head = between[end + 1 :]
        self._opening_head = self.encoder.start(self.frame.before_user + "Question:")
        self._opening_tail = self.encoder.trusted(f"\n{instruction}{self.frame.generation}")
        self._reply_tail = self.encoder.trusted(f"</interaction_response>{self.frame.generation}")
        self._check_pieces(instruction)

    def _check_pieces(self, instruction: str) -> None:
        """Raise UsageError unless the pieces of a dialogue, encoded one by one, make the template's text.

        The pieces are an opening, a turn that holds every tag, and a reply. Everything but the turn itself is
        compared with the dialogue encoded as a whole.
        """
        frame, name = self.frame, name_of(self.tokenizer)
        tags = " ".join(TAGS)
        turn = self.encoder.trusted(tags)
        decoded_turn = text_of(self.tokenizer, turn)
        if not all(tag in decoded_turn for tag in TAGS):
            raise UsageError(
                f"{name} decodes the tags of the game as {decoded_turn[:40]!r}…, so that no turn of an agent "
                "could be read: not supported"
            )
        first = f"{frame.before_user}Question: Who?\n{instruction}{frame.generation}"
        second = f"{frame.between}<interaction_response>Bob.</interaction_response>{frame.generation}"
        opening = self.opening("Who?")
        pieces = text_of(self.tokenizer, opening + turn + self.reply("Bob.", after=turn[-1]))
        whole = text_of(self.tokenizer, self.encoder.start(first + tags + second))
        last_tag = TAGS[-1]
        same_opening = text_of(self.tokenizer, opening) == text_of(self.tokenizer, self.encoder.start(first))
        same_reply = pieces.rpartition(last_tag)[2] == whole.rpartition(last_tag)[2]
        if not (same_opening and same_reply):
            raise UsageError(
                f"{name}: tokenizing the pieces of a dialogue one by one can give other tokens than "
                "tokenizing the whole text: not supported"
            )

    def opening(self, question: str) -> list[int]:
        """The tokens of the first user message, with question and instruction, up to the agent's turn."""
        return self._opening_head + self.encoder.untrusted(" " + question) + self._opening_tail

    def reply(self, text: str, *, after: int, max_tokens: int = 0) -> list[int]:
        """The tokens of the environment's reply as the next user message, up to the agent's turn.

        `after` is the last token of the dialogue so far: if it does not end the agent's message, the message
        is closed here. A reply of more than `max_tokens` tokens (0: no limit) is cut and marked.
        """
        close = [] if after == self.turn_end else self._close
        text = text.replace("</interaction_response", "&lt;/interaction_response")  # may not close our frame
        # Replies may have megabytes, which take seconds to encode.
        beginning = text[: max_tokens * LONGEST_TOKEN] if max_tokens else text
        content = self.encoder.untrusted(beginning)
        if max_tokens and (len(content) > max_tokens or len(beginning) < len(text)):
            content = self._whole_characters(content[:max_tokens]) + self.encoder.trusted(CUT)
        return close + self._reply_head + content + self._reply_tail

    def _whole_characters(self, tokens: list[int]) -> list[int]:
        """Drop a partial character at the end: at most 3 bytes of UTF-8, so at most 3 tokens."""
        for end in range(len(tokens), max(len(tokens) - 4, 0), -1):
            if not text_of(self.tokenizer, tokens[:end]).endswith("\ufffd"):
                return tokens[:end]
        return tokens

    def turn_text(self, tokens: Sequence[int]) -> str:
        """The text of one turn as `parse` reads it: with the <think> that the template has opened for it, and
        without the stop token at the end.
        """
        if tokens and tokens[-1] in self.stop_ids:
            tokens = tokens[:-1]
        return self.opened + text_of(self.tokenizer, tokens)
