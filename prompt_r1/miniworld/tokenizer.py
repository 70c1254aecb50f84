"""A small byte-level BPE tokenizer for the mini world."""

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from prompt_r1.protocol import INSTRUCTIONS, TAGS
from prompt_r1.types import Question, Turn

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""


def train_tokenizer(texts: Iterable[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `texts`. Its vocabulary has all 256 bytes, so any text can be encoded and decoded.

    Each tag is one added token, but not a special one: like Qwen3's `<think>`, it is text of the agent, which
    decoding keeps.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def plain_text(question: Question, turns: list[Turn]) -> str:
    """The text of a demonstration without tags, for `train_tokenizer`: no merge may contain part of a tag."""
    opening = f"user\nQuestion: {question.text}\n{INSTRUCTIONS['short']}"
    said = [f"assistant\n{turn.text}\nuser\n{turn.reply or ''}" for turn in turns]
    return re.sub("|".join(TAGS), "\n", "\n".join([opening, *said]))
