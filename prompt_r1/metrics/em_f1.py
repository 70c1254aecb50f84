"""Score an answer by EM, SM, F1 and math.

Each metric is the best over the gold answers. Texts are compared after SQuAD normalisation. The default rules
are strict: a number keeps its sign, point and slash, an empty prediction scores 0, and a gold answer of which
normalisation leaves nothing ("a", "$") is matched only by the same text. The official rules are those of the
released code, for comparison with its tables; they are too lenient in places: "-5" = "5", "1/2" = "12", SM is
1 for an empty prediction and for "a". The release has no `math`, so it has one set of rules. SSim, which
needs a model, is in `similarity.py`.
"""

import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from prompt_r1.metrics.numbers import remove_layout, same_number, without_lead

Rules = Literal["strict", "official"]

ARTICLES = re.compile(r"\b(a|an|the)\b")
DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
UNICODE_MINUS = "\N{MINUS SIGN}"

FRACTION = re.compile(r"(?<=\d)\s*/\s*(?=-?\d)")  # MathQA writes "33 1 / 3"
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# "18-20", "3:2", "(1,2)" and "10^5" are two numbers each. Without a blank they would become one other number.
BETWEEN_NUMBERS = re.compile(r"(?<=\d)(?:[,:\N{EN DASH}-]|[!\"#$%&'()*+;<=>?@\[\\\]^_`{|}~]+)(?=\d)")
NUMBER_SIGN = r"(?<!\w)-(?=\$?\.?\d)"
NUMBER_POINT = r"(?<=\d)\.(?=\d)|(?<![\w.])\.(?=\d)"
NUMBER_SLASH = r"(?<=\d)/(?=-?\d)"
LEADING_SIGN = re.compile(r"^([\s$(]*)-\s+(?=\$?\s*\.?\d)")
BLANKS = re.compile(r"\s+(?!\d)|(?<!\d)\s+")
OPERATORS = re.compile(r"[-+*/^!<>=|:±%$€£¥₹\\()\[\]]")
# Group 1 is the punctuation that is kept.
PUNCTUATION = re.compile(f"({NUMBER_SIGN}|{NUMBER_POINT}|{NUMBER_SLASH})|[{re.escape(string.punctuation)}]")


@dataclass(frozen=True)
class TextScores:
    """The four metrics of one prediction, each from 0 to 1."""

    em: float
    sm: float
    f1: float
    math: float


def score_text(prediction: str, answers: Sequence[str], *, rules: Rules = "strict") -> TextScores:
    """EM, SM, F1 and math of a prediction."""
    official = rules == "official"
    return TextScores(
        em=exact_match(prediction, answers, official=official),
        sm=substring_match(prediction, answers, official=official),
        f1=f1(prediction, answers, official=official),
        math=math_match(prediction, answers),
    )


def normalise(text: str, *, official: bool = False) -> str:
    """Lower the case, drop punctuation and articles, and collapse white space (SQuAD).

    With the strict rules numbers keep their sign, point and slash.
    """
    text = text.lower()
    if official:
        text = text.translate(DROP_PUNCTUATION)
    else:
        text = FRACTION.sub("/", LEADING_SIGN.sub(r"\1-", text.replace(UNICODE_MINUS, "-")))
        text = BETWEEN_NUMBERS.sub(" ", THOUSANDS.sub("", text))
        text = PUNCTUATION.sub(r"\1", text)
    return " ".join(ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction equals a gold answer, else 0."""
    return _best(operator.eq, prediction, answers, official)


def substring_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction contains a gold answer as whole words, else 0.

    Official rules: 1 if one of the two is a substring of the other.
    """
    return _best(_overlaps if official else _contains, prediction, answers, official)


def f1(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """F1 over the multisets of words (eq. 14). Official rules: 1 if both texts are empty."""
    return _best(_f1, prediction, answers, official)


def math_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals a gold answer as text, as LaTeX without layout, or as a number; else 0."""
    return float(any(_same_text(prediction, gold) or same_number(prediction, gold) for gold in answers))


def _same_text(prediction: str, gold: str) -> bool:
    """Whether two answers are equal as formulas, or as texts with the same operators.

    Blanks do not count, except between digits: "3 1/2" is not "31/2".
    """
    predicted, wanted = (without_lead(remove_layout(text).lower()) for text in (prediction, gold))
    if predicted and BLANKS.sub("", predicted) == BLANKS.sub("", wanted):
        return True
    return OPERATORS.findall(predicted) == OPERATORS.findall(wanted) and exact_match(predicted, [wanted]) == 1


def _best(
    metric: Callable[[str, str], float], prediction: str, answers: Sequence[str], official: bool
) -> float:
    predicted = normalise(prediction, official=official)

    def score(gold: str) -> float:
        wanted = normalise(gold, official=official)
        if wanted or official:
            return metric(predicted, wanted) if predicted or official else 0.0
        return bool(gold.strip()) and prediction.strip().lower() == gold.strip().lower()

    return float(max(map(score, answers), default=0.0))


def _contains(prediction: str, gold: str) -> bool:
    return f" {gold} " in f" {prediction} "


def _overlaps(prediction: str, gold: str) -> bool:
    return gold in prediction or prediction in gold


def _f1(prediction: str, gold: str) -> float:
    if not prediction and not gold:
        return 1.0
    predicted, wanted = prediction.split(), gold.split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
