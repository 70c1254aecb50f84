"""The protocol of a game: instruction, tags, `parse`, and the `Codec` between text and tokens.

Two rules keep training correct:

1. Tokens are append-only. What the agent sampled is never encoded again, and other text is encoded once.
2. Text from outside (questions, replies) is encoded separately from our own frame of roles, tags and
   instruction (`chat_template.Frame`), so that it can never become a control token.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prompt_r1.chat_template import PieceEncoder, closing_tokens, decode, frame_of, name_of, opened_think
from prompt_r1.errors import UsageError
from prompt_r1.types import Action

if TYPE_CHECKING:  # `--help` reads this file, and the import takes seconds.
    from transformers import PreTrainedTokenizerBase

# Table 1 of the paper. The prompts in the data files of the paper's authors end with exactly these bytes,
# also with the blank after rule 3 (\N{SPACE}).
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

# An empty reply is replaced by this text, because servers refuse empty messages. The turn is rewarded as any
# other turn (M_t in eq. 12, reward.py).
NO_REPLY = "(no reply)"
CUT = " [cut]"  # This is appended to a reply if the agent reads only its beginning.
# Encoding megabytes takes seconds. So only the first `max_tokens` × 64 characters of a reply are encoded:
# hardly any token has more characters.
MAX_CHARACTERS_PER_TOKEN = 64

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

    The thought is the first think block. The action is the first complete prompt or answer block after it,
    or of the whole turn if there is no think block. A block ends at the first closing tag. If several opening
    tags precede this tag, the last of them begins the block: in "<think>a<think>b</think>" the thought is b.
    `text` must be the agent's own, because tags in a reply of the environment mean nothing.
    """
    think, think_end = _block(text, "think", 0)
    prompt, prompt_end = _block(text, "interaction_prompt", think_end)
    answer, answer_end = _block(text, "answer", think_end)
    if prompt is not None and answer is not None:  # The block that ends first counts.
        if prompt_end < answer_end:
            answer = None
        else:
            prompt = None
    return Action(think, prompt, answer, clean=bool(think) and _is_clean(text))


def _block(text: str, name: str, start: int) -> tuple[str | None, int]:
    """The stripped content of the first complete <name> block at or after `start`, and the block's end.

    Returns (None, `start`) if there is no such block.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    first = text.find(opening, start)
    close = text.find(closing, first + len(opening)) if first >= 0 else -1
    if close < 0:
        return None, start
    begin = text.rfind(opening, start, close) + len(opening)
    return text[begin:close].strip(), close + len(closing)


def _is_clean(text: str) -> bool:
    """Whether the turn is a think block, then a prompt or an answer, and nothing else, not even a tag."""
    # text, tag, text, …: a clean turn has four tags, so no more than five have to be found.
    pieces = ANY_TAG.split(text, maxsplit=5)
    texts, tags = pieces[::2], pieces[1::2]
    if tags not in CLEAN_TURNS:
        return False
    before, _think, between, _action, after = texts
    return not (before + between + after).strip()


def shown_reply(reply: str) -> str:
    """A reply as it stands in the dialogue: itself, or NO_REPLY if it is blank."""
    return reply if reply.strip() else NO_REPLY


class Codec:
    """Converts the turns of a game between text and tokens, by the two rules above.

    `PieceEncoder` has three functions. `trusted_start` encodes our text at the start of a dialogue, and
    `trusted` our text that continues it. Both texts may name control tokens. `untrusted` encodes text from
    outside, such as a reply, without control tokens.

    Works with any Hugging Face tokenizer whose chat template has a frame. A turn ends with one of `stop_ids`:
    the token by which the template ends a message, the tokenizer's eos token, and those that `load_agent`
    adds. Raises UsageError if the tokenizer or its chat template cannot be used.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", instruction: str) -> None:
        self.tokenizer = tokenizer
        # The frame is tried with a message like the first one of a game.
        self.frame = frame_of(tokenizer, f"Question: Who?\n{instruction}")
        # The <think> that the template itself writes at the start of every turn of the agent, or "".
        self.opened = opened_think(self.frame.generation)
        self.encoder = PieceEncoder(tokenizer)
        # Before a reply stand the template's markers, such as <|im_end|>\n<|im_start|>user\n, and our tag
        # <interaction_response>. In this example, `_close` is <|im_end|>, and `_reply_head` is the rest. The
        # agent usually ends its message itself, so `_close` is added only if the turn was cut off.
        before_reply = self.encoder.trusted(self.frame.between + "<interaction_response>")
        # `closing_tokens` treats an added token, such as <|im_end|>, as the end of a message. In some
        # tokenizers, as in the mini agent's, our tags are added tokens, too. They do not end a message.
        self._close = closing_tokens(before_reply, tokenizer, not_ends=TAGS)
        self._reply_head = before_reply[len(self._close) :]
        self.turn_end: int = self._close[-1] if self._close else tokenizer.eos_token_id
        self.stop_ids = frozenset({self.turn_end, tokenizer.eos_token_id} - {None})
        self._opening_head = self.encoder.trusted_start(self.frame.before_user + "Question:")
        self.opening_tail = self.encoder.trusted(f"\n{instruction}{self.frame.generation}")
        self._reply_tail = self.encoder.trusted(f"</interaction_response>{self.frame.generation}")
        self._check_pieces(instruction)

    def opening(self, question: str) -> list[int]:
        """The tokens of the first user message (question and instruction), up to the agent's turn."""
        return self._opening_head + self.encoder.untrusted(" " + question) + self.opening_tail

    def reply(self, text: str, *, after: int, max_tokens: int = 0) -> list[int]:
        """The tokens of the environment's reply as the next user message, up to the agent's turn.

        `after` is the last token of the dialogue so far. If it is not `turn_end`, because the turn was cut
        off or ended with another stop token, the agent's message is closed first. A reply of more than
        `max_tokens` tokens is cut and marked; 0: no limit.
        """
        close = [] if after == self.turn_end else self._close
        # The text may not close our own tag.
        text = text.replace("</interaction_response", "&lt;/interaction_response")
        beginning = text[: max_tokens * MAX_CHARACTERS_PER_TOKEN] if max_tokens else text
        content = self.encoder.untrusted(beginning)
        if max_tokens and (len(content) > max_tokens or len(beginning) < len(text)):
            content = content[:max_tokens] + self.encoder.trusted(CUT)
        return close + self._reply_head + content + self._reply_tail

    def turn_text(self, tokens: Sequence[int]) -> str:
        """The text of one turn, as `parse` reads it.

        The text begins with the <think> that the template has opened, if it opens one. The stop token at the
        end is left out.
        """
        if tokens and tokens[-1] in self.stop_ids:
            tokens = tokens[:-1]
        return self.opened + decode(self.tokenizer, tokens)

    def _check_pieces(self, instruction: str) -> None:
        """Raise UsageError unless the pieces of a dialogue decode to the text of the template.

        A short dialogue (an opening, a turn that holds every tag, and a reply) is encoded piece by piece, and
        once as a whole. Both must decode to the same opening and to the same reply. The turn may differ,
        because in a game it is sampled, and never encoded from text.
        """
        frame, name = self.frame, name_of(self.tokenizer)
        tags = " ".join(TAGS)
        turn = self.encoder.trusted(tags)
        decoded_turn = decode(self.tokenizer, turn)
        if not all(tag in decoded_turn for tag in TAGS):
            raise UsageError(
                f"{name} decodes the tags of the game as {decoded_turn[:40]!r}…, so that no turn of an agent "
                "could be read: not supported"
            )

        def decoded_reply(tokens: list[int]) -> str:
            """The text after the turn. The turn ends with the last of TAGS."""
            return decode(self.tokenizer, tokens).rpartition(TAGS[-1])[2]

        opening_text = f"{frame.before_user}Question: Who?\n{instruction}{frame.generation}"
        reply_text = f"{frame.between}<interaction_response>Bob.</interaction_response>{frame.generation}"
        opening = self.opening("Who?")
        pieces = opening + turn + self.reply("Bob.", after=turn[-1])
        whole_opening = self.encoder.trusted_start(opening_text)
        whole = self.encoder.trusted_start(opening_text + tags + reply_text)
        same_opening = decode(self.tokenizer, opening) == decode(self.tokenizer, whole_opening)
        same_reply = decoded_reply(pieces) == decoded_reply(whole)
        if not (same_opening and same_reply):
            raise UsageError(
                f"{name}: tokenizing the pieces of a dialogue one by one can give other tokens than "
                "tokenizing the whole text: not supported"
            )
