"""The text of a reply: what a model wrote, without its thinking and the tokens that end it."""

import re

from prompt_r1.environments.sources import Reply

# The tags around thinking that the server does not separate from the reply. Models write <think>, <thinking>,
# <thought>, <seed:think>, [THINK] or ◁think▷. Group 1 is "/" in a closing tag.
THINK_TAG = re.compile(r"[<\[◁](/?)(?:seed:)?(?:think|thinking|thought)[>\]▷]", re.IGNORECASE)
# The control tokens that servers leave at the end of a reply, by the models that write them, in any letter
# case. Only known tokens count, because "<|x|>" and "[|x - y|]" are mathematics.
END_TOKENS_OF = {
    "Llama and Mistral": "</s> [/INST] <|eot_id|> <|eom_id|> <|eot|> <|end_of_text|>",
    "Gemma": "<eos> <pad> <end_of_turn> <turn|>",
    "Qwen, SmolLM and other users of ChatML": "<|im_end|> <|endoftext|>",
    "DeepSeek": "<｜end▁of▁sentence｜> <|EOT|>",
    "GLM": "<|user|> <|observation|>",
    "Phi and gpt-oss": "<|end|> <|return|>",
    "Kimi": "[EOS] [PAD] <|end_of_msg|>",
    "Command": "<|END_OF_TURN_TOKEN|> <|END_RESPONSE|>",
    "Grok": "<|eos|> <|pad|>",
    "SmolVLM": "<end_of_utterance>",
    "OpenChat": "<|end_of_turn|>",
    "HyperCLOVA X": "<|endofturn|>",
    "EXAONE": "[|endofturn|]",
    "Ling": "<|role_end|>",
    "Yuan": "<eod>",
}
END_TOKENS = " ".join(END_TOKENS_OF.values()).split()
END_TOKEN = re.compile("|".join(map(re.escape, END_TOKENS)), re.IGNORECASE)


def reply_of(written: str, *, label: str = "", reasoning: str = "", finish: str = "stop") -> Reply:
    """Make a reply of what a model wrote, without its thinking and the tokens that end it.

    If that leaves no text, the reply gets a label.
    """
    # If the server has separated the thinking, no block is open at the beginning.
    thought, text = cut_thinking(written, may_be_open=not reasoning)
    text = without_end_tokens(text)
    if not text.strip() and not label:
        label = "length" if finish == "length" else "empty"
    return Reply(text, label=label, reasoning=reasoning or thought, finish=finish)


def cut_thinking(written: str, *, may_be_open: bool = True) -> tuple[str, str]:
    """Split a text into its thinking and the rest.

    The thinking is in blocks at the beginning. If a block has no closing tag, everything after its opening
    tag is thinking. With `may_be_open`, the chat template may have opened a block: then everything before a
    lone closing tag is thinking.
    """
    thoughts: list[str] = []
    begin = 0  # Everything before has been read.
    while tag := THINK_TAG.search(written, begin):
        before = written[begin : tag.start()]
        closing: re.Match[str] | None
        if is_closing(tag) and may_be_open:  # The chat template has opened the block.
            thought, closing = before, tag
        elif not is_closing(tag) and not before.strip():
            closing = next(filter(is_closing, THINK_TAG.finditer(written, tag.end())), None)
            thought = written[tag.end() : closing.start() if closing else None]
        else:
            break  # The reply has begun, and only mentions the tag.
        thoughts.append(thought.strip())
        begin = closing.end() if closing else len(written)
    text = written[begin:].strip() if begin else written
    return "\n".join(filter(None, thoughts)), text


def is_closing(tag: re.Match[str]) -> bool:
    """Whether a match of THINK_TAG is a closing tag."""
    return tag[1] == "/"


def without_end_tokens(text: str) -> str:
    """The text without the control tokens at its end, and without the white space around them."""
    end = len(text)
    for token in reversed(list(END_TOKEN.finditer(text))):
        after = text[token.end() : end]
        if after.strip():
            break
        end = token.start()
    return text if end == len(text) else text[:end].rstrip()
