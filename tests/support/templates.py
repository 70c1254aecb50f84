"""Small chat templates like those of well-known models, and tokenizers of the usual kinds."""

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Kind:
    """A chat template, and what the codec must find in it."""

    template: str
    specials: tuple[str, ...]  # its control tokens, first eos
    turn_end: str
    opened: str = ""  # the end of the generation prompt, where it opens <think>


def template(*, user: str, assistant: str, generation: str, before: str = "") -> str:
    """A chat template that writes messages `m` so, with `before` at the start."""
    return (
        before
        + "{% for m in messages %}{% if m.role == 'user' %}"
        + user
        + "{% else %}"
        + assistant
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + generation
        + "{% endif %}"
    )


def chatml(generation: str, *, text: str = "{{ m.content }}", before: str = "") -> str:
    """ChatML with this text of an assistant's message, and this end of the generation prompt."""
    return template(
        before=before,
        user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
        assistant=f"<|im_start|>assistant\n{text}<|im_end|>\n",
        generation=f"<|im_start|>assistant\n{generation}",
    )


LATER = "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"  # earlier think blocks are dropped
CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
ROLE = "{{ '<start_of_turn>model' if m.role == 'assistant' else '<start_of_turn>user' }}\n"
GEMMA = ROLE + "{{ m.content | trim }}<end_of_turn>\n"
SOLAR = "### {{ m.role | title }}:\n{{ m.content }}\n\n"
DATE = "<|im_start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|im_end|>\n"

KINDS = {
    "Qwen2.5": Kind(
        chatml("", before="<|im_start|>system\nYou are helpful.<|im_end|>\n"), CHATML, "<|im_end|>"
    ),
    "Qwen3": Kind(chatml("", text=LATER), CHATML, "<|im_end|>"),
    "Qwen3-Thinking, Qwen3.5": Kind(chatml("<think>\n", text=LATER), CHATML, "<|im_end|>", "<think>\n"),
    "Qwen3 without thinking": Kind(chatml("<think>\n\n</think>\n\n", text=LATER), CHATML, "<|im_end|>"),
    "SmolLM3, with a date": Kind(chatml("", before=DATE), CHATML, "<|im_end|>"),
    "DeepSeek-R1-distill": Kind(
        template(
            before="{{ bos_token }}",
            user="<｜User｜>{{ m.content }}",
            assistant="<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>",
            generation="<｜Assistant｜><think>\n",
        ),
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "<think>\n",
    ),
    "GLM-5": Kind(
        template(
            before="[gMASK]<sop>",
            user="<|user|>{{ m.content }}",
            assistant="<|assistant|></think>{{ m.content.split('</think>')[-1] }}",
            generation="<|assistant|><think>",
        ),
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
        "<|user|>",
        "<think>",
    ),
    "Llama-2-chat": Kind(
        template(
            user="{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]",
            assistant="{{ ' ' + m.content.strip() + ' ' + eos_token }}",
            generation="",
        ),
        ("</s>", "<s>"),
        "</s>",
    ),
    "Mistral": Kind(
        template(
            before="{{ bos_token }}",
            user="[INST] {{ m.content }}[/INST]",
            assistant="{{ ' ' + m.content + eos_token }}",
            generation="",
        ),
        ("</s>", "<s>", "[INST]", "[/INST]"),
        "</s>",
    ),
    "Gemma": Kind(
        template(before="{{ bos_token }}", user=GEMMA, assistant=GEMMA, generation="<start_of_turn>model\n"),
        ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "DeepSeek-Coder": Kind(
        template(
            before="{{ bos_token }}",
            user="### Instruction:\n{{ m.content }}\n",
            assistant="### Response:\n{{ m.content }}\n<|EOT|>\n",
            generation="### Response:",
        ),
        ("<|EOT|>", "<｜begin▁of▁sentence｜>"),
        "<|EOT|>",
    ),
    "a begin token in every turn, no end token": Kind(
        template(
            user="{{ bos_token }}USER: {{ m.content }}\n",
            assistant="ASSISTANT: {{ m.content }}\n",
            generation="ASSISTANT:",
        ),
        ("</s>", "<s>"),
        "</s>",
    ),
    "SOLAR": Kind(
        template(user=SOLAR, assistant=SOLAR, generation="### Assistant:\n"), ("</s>", "<s>"), "</s>"
    ),
}

TOKENIZERS = (
    "byte level",
    "byte level, prefix blank",
    "sentencepiece, legacy",
    "sentencepiece, first",
    "sentencepiece, always",
    "sentencepiece, no prefix",
    "unigram, first",
)

BLANK = "▁"  # sentencepiece writes blanks as this character
BPE_MERGES = [(BLANK, "W"), ("W", "h"), ("Wh", "o"), (BLANK, "Who"), (BLANK, BLANK), ("<", "/")]


def byte_level(*, prefix: bool) -> Tokenizer:
    """Every byte is a token; with `prefix`, a text gets a blank before it, as in RoBERTa."""
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    core.decoder = decoders.ByteLevel()
    return core


def sentencepiece(model: str, prefix: str) -> Tokenizer:
    """Characters and a few words with byte fallback, as converted from sentencepiece (Llama 2, Gemma, T5)."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), BLANK, *map(chr, range(33, 127))]
    names = list(dict.fromkeys(names + ["".join(pair) for pair in BPE_MERGES]))
    if model == "unigram":
        scores = [(name, -99.0 if name.startswith("<0x") else -9.0 + len(name)) for name in names]
        core = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        vocabulary = {name: number for number, name in enumerate(names)}
        core = Tokenizer(
            models.BPE(vocab=vocabulary, merges=BPE_MERGES, byte_fallback=True, unk_token="<unk>")
        )
    replace = normalizers.Replace(" ", BLANK)
    if prefix == "legacy":
        core.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), replace])
    elif prefix == "no prefix":
        core.normalizer = replace
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, prepend_scheme=prefix, split=False)
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix != "no prefix" else steps)
    return core


@cache
def tokenizer_of(kind: Kind, name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of TOKENIZERS with the template and the control tokens of a kind."""
    if name.startswith("byte level"):
        core = byte_level(prefix="prefix" in name)
    else:
        core = sentencepiece(*name.split(", "))
    core.add_special_tokens(list(kind.specials))
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    bos = next(
        (token for token in kind.specials if "begin" in token or token in ("<s>", "<bos>")), kind.specials[0]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=kind.specials[0], bos_token=bos)
    wrapped.chat_template = kind.template
    return wrapped
