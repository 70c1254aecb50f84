"""How good is a predicted answer: EM, SM, F1 and math; each the best over the gold answers.

Texts are compared after SQuAD normalisation. The default is strict: numbers keep what makes them numbers, and
an empty prediction is worth nothing. `official=True` repeats the release's rules with their leaks, to compare
with its tables: "-5" = "5", "1/2" = "12", an empty prediction has SM = 1, "a" matches any text. The release
has no `math`: that one is the same under both. SSim, which needs a model, is in `similarity.py`.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from prompt_r1.metrics.numbers import plain, same_number

Rules = Literal["strict", "official"]

ARTICLES = re.compile(r"\b(a|an|the)\b")
DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
UNICODE_MINUS = "\N{MINUS SIGN}"

FRACTION = re.compile(r"(?<=\d)\s*/\s*(?=-?\d)")  # MathQA writes "33 1 / 3"
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# "18-20", "3:2", "(1,2)", "10^5" are two numbers: without a blank they would become another one.
BETWEEN_NUMBERS = re.compile(r"(?<=\d)(?:[,:\N{EN DASH}-]|[!\"#$%&'()*+;<=>?@\[\\\]^_`{|}~]+)(?=\d)")
NUMBER_SIGN = r"(?<!\w)-(?=\$?\.?\d)"
NUMBER_POINT = r"(?<=\d)\.(?=\d)|(?<![\w.])\.(?=\d)"
NUMBER_SLASH = r"(?<=\d)/(?=-?\d)"
# Group 1 holds what is kept of the punctuation.
PUNCTUATION = re.compile(f"({NUMBER_SIGN}|{NUMBER_POINT}|{NUMBER_SLASH})|[{re.escape(string.punctuation)}]")


@dataclass(frozen=True)
class Scores:
    """The four metrics of one prediction, each from 0 to 1."""

    em: float
    sm: float
    f1: float
    math: float


def judge_text(prediction: str, answers: Sequence[str], *, rules: Rules = "strict") -> Scores:
    """EM, SM, F1 and math of a prediction: the one door to the metrics for evaluations."""
    official = rules == "official"
    return Scores(
        em=exact_match(prediction, answers, official=official),
        sm=substring_match(prediction, answers, official=official),
        f1=f1(prediction, answers, official=official),
        math=math_match(prediction, answers),
    )


def normalise(text: str, *, official: bool = False) -> str:
    """Lower case, no punctuation, no articles, single blanks. Strict: numbers keep sign, point and slash."""
    text = text.lower()
    if official:
        text = text.translate(DROP_PUNCTUATION)
    else:
        text = FRACTION.sub("/", text.replace(UNICODE_MINUS, "-"))
        text = BETWEEN_NUMBERS.sub(" ", THOUSANDS.sub("", text))
        text = PUNCTUATION.sub(r"\1", text)
    return " ".join(ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction equals a gold answer."""
    return _best(_equals, prediction, answers, official)


def substring_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction contains a gold answer as whole words. Official: if one is within the other."""
    return _best(_overlaps if official else _contains, prediction, answers, official)


def f1(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """Harmonic mean of precision and recall over the multisets of words (eq. 14); 0 for two empty texts."""
    return _best(_f1, prediction, answers, official)


def math_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals a gold answer, as a text, as LaTeX without its layout, or as a number."""
    if exact_match(prediction, answers):
        return 1.0
    bare = plain(prediction).replace(" ", "")
    return float(any(
        (bare and bare == plain(gold).replace(" ", "")) or same_number(prediction, gold) for gold in answers
    ))  # fmt: skip


def _best(
    compare: Callable[[str, str], float], prediction: str, answers: Sequence[str], official: bool
) -> float:
    prediction = normalise(prediction, official=official)
    if not prediction and not official:
        return 0.0
    return max((compare(prediction, normalise(gold, official=official)) for gold in answers), default=0.0)


def _equals(prediction: str, gold: str) -> float:
    return float(prediction == gold)


def _contains(prediction: str, gold: str) -> float:
    return float(bool(gold) and f" {gold} " in f" {prediction} ")


def _overlaps(prediction: str, gold: str) -> float:
    return float(gold in prediction or prediction in gold)


def _f1(prediction: str, gold: str) -> float:
    predicted, wanted = prediction.split(), gold.split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
