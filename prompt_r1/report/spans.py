"""The spans that an agent wrote or read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `--help` reads this file, and transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass
class Span:
    """Consecutive tokens that the agent wrote, or read. A reply has the duration of its call.

    Of each written token, `lengths` has its characters, in a digit of base 36. Its log-probability in nats
    when it was sampled, and the log of its ratio in the update, have two digits: `_digits`. "": not known.
    """

    text: str
    tokens: int = 0  # 0: not known
    written: bool = False
    lengths: str = ""
    logprobs: str = ""  # from -12.95 to 0
    ratios: str = ""  # from -6.48 to 6.47
    advantage: float | None = None  # of the game; None: not trained on
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
    advantage = row.get("advantage")
    if texts is None:
        spans = [Span(row["question"]["text"])]
        for turn in row["turns"]:
            spans.append(Span(turn["text"], written=True, advantage=advantage))
            if turn["reply"] is not None:
                spans.append(Span(turn["reply"]))
        return spans
    logprobs, ratios = iter(row.get("logprobs", ())), iter(row.get("log_ratios", ()))
    spans, start = [], 0
    for sampled, run in groupby(row["sampled"], key=int):
        end = start + len(list(run))
        tokens = tuple(row["tokens"][start:end])
        span = Span(texts.text(tokens), len(tokens))
        if sampled:
            span.written, span.lengths, span.advantage = True, texts.lengths(tokens), advantage
            span.logprobs = _digits(islice(logprobs, len(tokens)), len(tokens), zero=1295)
            span.ratios = _digits(islice(ratios, len(tokens)), len(tokens), zero=648)
        spans.append(span)
        start = end
    return spans


def _digits(nats: Iterable[float | None], count: int, *, zero: int) -> str:
    """Two digits of base 36 for each of `count` numbers: hundredths, from -zero. "": some are unknown."""
    known = [round(100 * value) + zero for value in nats if value is not None]
    if len(known) < count:
        return ""
    return "".join(DIGITS[n // 36] + DIGITS[n % 36] for n in (min(max(n, 0), 1295) for n in known))
