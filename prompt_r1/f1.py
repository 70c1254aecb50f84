"""Score an answer by EM, SM and F1.

Each metric is the best over the gold answers. Texts are compared after SQuAD normalisation. The default rules
are strict: typographic variants of a character are equal, a number keeps its sign, point and slash, an empty
prediction scores 0, and a gold answer of which normalisation leaves nothing ("a", "$") is matched only by the
same text. The official rules are those of the released code, for comparison with its tables; they are too
lenient in places: "-5" = "5", "1/2" = "12", SM is 1 for an empty prediction and for "a". SSim, which needs a
model, is in `similarity.py`.
"""

import operator
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

ARTICLES = re.compile(r"\b(a|an|the)\b")
DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)

# Plain forms of characters that neither NFKC nor their Unicode category makes plain: accents that stand alone
# and letters of the shape of an apostrophe, the minus, the slashes of fractions, the sign of multiplication,
# the point and the comma of Arabic numbers, and the selectors of an emoji's colour.
PLAIN = dict.fromkeys("´ʹʻʼ", "'") | {"\u2212": "-", "\u2044": "/", "\u2215": "/", "\u00d7": "x"}
PLAIN |= {"\u066b": ".", "\u066c": ",", "\ufe0e": "", "\ufe0f": ""}
OF_CATEGORY = {"Pd": "-", "Cf": ""}  # dashes, and characters without a width; other punctuation is a quote
# "10³" is 10^3 and not 103, "3½" is 3 1/2. By the tag of the character's decomposition in Unicode.
WRITTEN_BEFORE = {"<super>": "^", "<sub>": "_", "<fraction>": " "}

FRACTION = re.compile(r"(?<=\d)\s*/\s*(?=-?\d)")  # MathQA writes "33 1 / 3"
THOUSANDS = re.compile(r"(?<=\d)[,'](?=\d{3}(?!\d))")
SPACED_THOUSANDS = re.compile("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))")  # but "5 100" is two
# "18-20", "3:2", "(1,2)" and "10^5" are two numbers each. Without a blank they would become one other number.
BETWEEN_NUMBERS = re.compile(r"(?<=\d)(?:[,:-]|[!\"#$%&'()*+;<=>?@\[\\\]^_`{|}~]+)(?=\d)")
NUMBER_SIGN = r"(?<!\w)-(?=\$?\.?\d)"
NUMBER_POINT = r"(?<=\d)\.(?=\d)|(?<![\w.])\.(?=\d)"
NUMBER_SLASH = r"(?<=\d)/(?=-?\d)"
LEADING_SIGN = re.compile(r"^([\s$(]*)-\s+(?=\$?\s*\.?\d)")
# Group 1 is the punctuation that is kept.
PUNCTUATION = re.compile(f"({NUMBER_SIGN}|{NUMBER_POINT}|{NUMBER_SLASH})|[{re.escape(string.punctuation)}]")


def normalise(text: str, *, official: bool = False) -> str:
    """Lower the case, drop punctuation and articles, and collapse white space (SQuAD).

    With the strict rules typographic characters are plain, and numbers keep their sign, point and slash.
    """
    if official:
        text = text.lower().translate(DROP_PUNCTUATION)
    else:
        text = plain_characters(text)
        text = FRACTION.sub("/", LEADING_SIGN.sub(r"\1-", text.casefold()))
        text = BETWEEN_NUMBERS.sub(" ", THOUSANDS.sub("", text))
        text = PUNCTUATION.sub(r"\1", text)
    return " ".join(ARTICLES.sub(" ", text).split())


def plain_characters(text: str) -> str:
    """Replace compatibility forms (NFKC), then digits, dashes, quotes and other punctuation by ASCII ones."""
    if text.isascii():
        return text
    text = SPACED_THOUSANDS.sub(",", text.replace("´", "'"))
    runs = groupby(text, lambda one: unicodedata.decomposition(one).partition(" ")[0])
    marked = "".join(WRITTEN_BEFORE.get(tag, "") + "".join(run) for tag, run in runs)
    return "".join(map(_plain_character, unicodedata.normalize("NFKC", marked)))


def _plain_character(one: str) -> str:
    if one.isascii() or one in PLAIN:
        return PLAIN.get(one, one)
    category = unicodedata.category(one)
    if category == "Nd":
        return str(unicodedata.decimal(one))
    return OF_CATEGORY.get(category, "'" if category.startswith("P") else one)


def exact_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction equals a gold answer, else 0."""
    return _best(operator.eq, prediction, answers, official)


def substring_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction contains a gold answer as whole words, else 0.

    Official rules: 1 if one of the two is a substring of the other.
    """

    def matches(predicted: str, gold: str) -> bool:
        if official:
            return gold in predicted or predicted in gold
        return f" {gold} " in f" {predicted} "

    return _best(matches, prediction, answers, official)


def f1(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """F1 over the multisets of words (eq. 14). Official rules: 1 if both texts are empty."""
    return _best(_f1, prediction, answers, official)


def _best(
    metric: Callable[[str, str], float], prediction: str, answers: Sequence[str], official: bool
) -> float:
    predicted = normalise(prediction, official=official)

    def score(gold: str) -> float:
        wanted = normalise(gold, official=official)
        if wanted or official:
            return metric(predicted, wanted) if predicted or official else 0.0
        said, meant = (plain_characters(text).strip().casefold() for text in (prediction, gold))
        return bool(meant) and said == meant

    return float(max(map(score, answers), default=0.0))


def _f1(prediction: str, gold: str) -> float:
    if not prediction and not gold:
        return 1.0
    predicted, wanted = prediction.split(), gold.split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
