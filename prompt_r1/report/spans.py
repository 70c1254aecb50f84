"""A game's text as spans that the agent wrote or read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `--help` reads this file, and transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass
class Span:
    """Consecutive tokens that the agent wrote, or read. A reply has the duration of its call.

    Written ones have a digit of base 36 in `lengths` for the characters of each token, and in `chances` two
    digits for the probability in percent with which it was sampled, at most 99. "": not known.
    """

    text: str
    tokens: int = 0  # 0: not known
    written: bool = False
    lengths: str = ""
    chances: str = ""
    seconds: float = 0.0


class TokenTexts:
    """Decodes the tokens of a run."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(100_000)(self._decode)

    @classmethod
    def of_run(cls, folder: Path) -> "TokenTexts | None":
        """Use the tokenizer of the run's agent; None while the run has saved none."""
        from prompt_r1.agent.loading import load_tokenizer

        agent = folder / "agent"
        return cls(load_tokenizer(agent)) if (agent / "config.json").exists() else None

    def _decode(self, tokens: tuple[int, ...]) -> str:
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def lengths(self, tokens: tuple[int, ...]) -> str:
        """The `lengths` of a span.

        "" if the texts of single tokens do not add up to the text, as for characters of several tokens.
        """
        pieces = [self.text((token,)) for token in tokens]
        if "".join(pieces) != self.text(tokens) or max(map(len, pieces)) >= len(DIGITS):
            return ""
        return "".join(DIGITS[len(piece)] for piece in pieces)


def spans_of(row: Mapping[str, Any], texts: TokenTexts | None) -> list[Span]:
    """A game of a trajectory file as spans; without a tokenizer from its recorded texts."""
    if texts is None:
        spans = [Span(row["question"]["text"])]
        for turn in row["turns"]:
            spans.append(Span(turn["text"], written=True))
            if turn["reply"] is not None:
                spans.append(Span(turn["reply"]))
        return spans
    spans, start, logprobs = [], 0, iter(row.get("logprobs", ()))
    for sampled, run in groupby(row["sampled"], key=int):
        end = start + len(list(run))
        tokens = tuple(row["tokens"][start:end])
        span = Span(texts.text(tokens), len(tokens))
        if sampled:
            chances = _percents([next(logprobs, None) for _ in tokens])
            span = Span(span.text, span.tokens, True, texts.lengths(tokens), chances)
        spans.append(span)
        start = end
    return spans


def _percents(logprobs: Sequence[float | None]) -> str:
    known = [logprob for logprob in logprobs if logprob is not None]
    if len(known) < len(logprobs):
        return ""  # the run did not record them
    return "".join(f"{min(99, int(100 * exp(logprob))):02}" for logprob in known)
