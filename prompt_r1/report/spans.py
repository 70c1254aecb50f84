"""The tokens of a game as text: what the agent wrote and what it only read, in turn."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from math import exp
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from prompt_r1.agent.policy import load_tokenizer

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
Row = dict[str, Any]


class Pieces:
    """Texts of tokens. Without a tokenizer (no agent was saved yet) there are none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.known = tokenizer is not None
        decode = tokenizer.decode if tokenizer else lambda *_, **__: ""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        self.text = lru_cache(100_000)(lambda tokens: str(decode(list(tokens), **options)))

    @classmethod
    def of_run(cls, folder: Path) -> "Pieces":
        """With the tokenizer of the run's agent."""
        agent = folder / "agent"
        return cls(load_tokenizer(agent) if (agent / "config.json").exists() else None)

    def lengths(self, tokens: tuple[int, ...]) -> str:
        """A digit (base 36) a token: its characters. "" where the texts of single tokens do not add up."""
        pieces = [self.text((token,)) for token in tokens]
        if "".join(pieces) != self.text(tokens) or max(map(len, pieces)) >= len(DIGITS):
            return ""  # a character may be spread over tokens
        return "".join(DIGITS[len(piece)] for piece in pieces)


def spans_of(row: Row, pieces: Pieces) -> list[Row]:
    """The game in runs of tokens: {text, tokens} read, {…, lengths, chances} written by the agent.

    `chances`: two digits a token, the probability in percent with which it was sampled (99 is the most).
    """
    if not pieces.known:
        return _from_turns(row)
    spans, start, logprobs = [], 0, iter(row.get("logprobs", ()))
    for sampled, run in groupby(row["sampled"], key=int):
        end = start + len(list(run))
        tokens = tuple(row["tokens"][start:end])
        span: Row = {"text": pieces.text(tokens), "tokens": len(tokens)}
        if sampled:
            span["lengths"] = pieces.lengths(tokens)
            span["chances"] = _percents([next(logprobs, None) for _ in tokens])
        spans.append(span)
        start = end
    return spans


def _percents(logprobs: Sequence[float | None]) -> str:
    known = [logprob for logprob in logprobs if logprob is not None]
    if len(known) < len(logprobs):
        return ""  # a run that did not record them
    return "".join(f"{min(99, int(100 * exp(logprob))):02}" for logprob in known)


def _from_turns(row: Row) -> list[Row]:
    """The same from the recorded texts, without counts of tokens."""
    spans: list[Row] = [{"text": row["question"]["text"], "tokens": 0}]
    for turn in row["turns"]:
        spans.append({"text": turn["text"], "tokens": 0, "lengths": "", "chances": ""})
        if turn["reply"] is not None:
            spans.append({"text": turn["reply"], "tokens": 0})
    return spans
