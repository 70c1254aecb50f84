r"""Score an answer by EM, SM and F1. Each is the best score over the gold answers (eqs 13 and 14).

Texts are normalised before they are compared, by one of two sets of rules:

    official   SQuAD's: lower case, no punctuation, no articles. They are here for comparison with the paper's
               tables, in the form of the paper's released code.
    strict     the default, which the reward uses. Punctuation that carries a value is kept.

The metrics come first, then what the strict rules keep. An empty prediction scores 0. If normalisation leaves
nothing of a gold answer ("a", "$"), only the same text matches it.

SSim, a metric that needs a model, is in `evaluation/similarity.py`.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

Metric = Callable[[str, str], float]
"""Compares a prediction with one gold answer, both normalised."""

ARTICLES = re.compile(r"\b(a|an|the)\b")
DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction equals a gold answer, else 0."""
    return _best(_equals, prediction, answers, official)


def substring_match(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """1 if the prediction contains a gold answer as whole words, else 0.

    Official rules: 1 if one of the two is a substring of the other.
    """
    return _best(_overlaps if official else _contains, prediction, answers, official)


def f1(prediction: str, answers: Sequence[str], *, official: bool = False) -> float:
    """F1 over the multisets of words (eq. 14). Official rules: 1 if both texts are empty."""
    return _best(_f1, prediction, answers, official)


def _best(metric: Metric, prediction: str, answers: Sequence[str], official: bool) -> float:
    """The highest score over the gold answers; 0 if there are none."""
    if official:
        predicted = normalise(prediction, official=True)
        scores = [float(metric(predicted, normalise(gold, official=True))) for gold in answers]
    else:
        # Letter case never makes an answer wrong. But whether a hyphen is a minus may depend on the case of a
        # letter beside it, as in "F-16" and "f-16". So the texts are compared as they are, and in lower case.
        scores = _strict_scores(metric, prediction, answers)
        scores += _strict_scores(metric, prediction.lower(), [gold.lower() for gold in answers])
    return max(scores, default=0.0)


def _strict_scores(metric: Metric, prediction: str, answers: Sequence[str]) -> list[float]:
    """The score by the strict rules for each gold answer."""
    predicted = normalise(prediction)
    scores: list[float] = []
    for gold in answers:
        wanted = normalise(gold)
        if not wanted:
            scores.append(float(_is_the_same_text(prediction, gold)))
        else:
            scores.append(float(metric(predicted, wanted)) if predicted else 0.0)
    return scores


def _is_the_same_text(prediction: str, gold: str) -> bool:
    """Whether two texts are equal but for case and typographic forms. Empty texts are not."""
    said = _plain_characters(prediction).strip().casefold()
    meant = _plain_characters(gold).strip().casefold()
    return meant != "" and said == meant


def _equals(predicted: str, wanted: str) -> bool:
    return predicted == wanted


def _contains(predicted: str, wanted: str) -> bool:
    return f" {wanted} " in f" {predicted} "


def _overlaps(predicted: str, wanted: str) -> bool:
    return wanted in predicted or predicted in wanted


def _f1(predicted: str, wanted: str) -> float:
    if not predicted and not wanted:
        return 1.0
    predicted_words, wanted_words = predicted.split(), wanted.split()
    common = sum((Counter(predicted_words) & Counter(wanted_words)).values())
    if common == 0:
        return 0.0
    precision = common / len(predicted_words)
    recall = common / len(wanted_words)
    return 2 * precision * recall / (precision + recall)


# All metrics of a game normalise the same answers, and the games of a question have the same gold answers.
@lru_cache(maxsize=10_000)
def normalise(text: str, *, official: bool = False) -> str:
    """Lower the case, drop punctuation and articles, and collapse white space (SQuAD).

    The strict rules keep the punctuation that carries a value, and make typographic characters plain.
    """
    if official:
        text = ARTICLES.sub(" ", text.lower().translate(DROP_PUNCTUATION))
    else:
        text = STRICT_ARTICLES.sub(" ", _drop_punctuation(text))
    return " ".join(text.split())


# The strict rules
#
# SQuAD's rules were made for names. In mathematics they make wrong answers right: "-5" equals "5", "1/2"
# equals "12", and "2x+3" equals "2x-3". KEPT lists with examples what the strict rules keep, and SEPARATOR
# what becomes a blank. All other punctuation is dropped, also brackets, "!", "|" and "%": "[0,1]" equals
# "(0,1)", and "5!" equals "5".


def _drop_punctuation(text: str) -> str:
    """The lower-case text without the punctuation that carries no value.

    The characters beside a mark decide whether it is kept. So each operator first gets a single spelling,
    without the blanks that do not count. Commas of thousands leave too, because they would be taken for
    separators.
    """

    def replacement(match: re.Match[str]) -> str:
        if match["separator"]:
            return " "
        return match["kept"] or ""

    text = _plain_characters(text)
    for typed, plain in COMPARISONS.items():
        text = text.replace(typed, plain)
    text = ARTICLE_AFTER_OPERATOR.sub("", text)  # 5 = a prime → 5 = prime
    text = SIGN.sub(r"\1", text)  # x = - 5 → x = -5
    text = COMPARISON_BEFORE_NUMBER.sub(r"\1", text)  # speed< 5 → speed<5
    text = WORD_BEFORE_COMPARISON.sub(" ", text)  # speed<5 → speed <5
    text = INFIX.sub(lambda match: match[0].strip(), text)  # F = ma → F=ma
    text = THOUSANDS.sub("", text)  # 1,234 → 1234
    return PUNCTUATION.sub(replacement, text).casefold()


def _plain_characters(text: str) -> str:
    """Replace typographic characters: compatibility forms (NFKC), dashes, quotes, and invisible ones."""
    if text.isascii():
        return text
    text = SUPERSCRIPT.sub(r"^\1", text)
    text = FRACTION_AFTER_DIGIT.sub(r" \1", text)
    return "".join(map(_plain_form, unicodedata.normalize("NFKC", text)))


def _plain_form(character: str) -> str:
    """The plain form of a character; "" for an invisible character."""
    if character in PLAIN:
        return PLAIN[character]
    if character.isascii():
        return character
    category = unicodedata.category(character)
    if category == "Cf":  # format characters, which are invisible
        return ""
    if category == "Pd":  # dashes
        return "-"
    if category.startswith("P"):
        return '"'  # Any ASCII mark that is dropped later would do.
    return character


# The letter "a" is a variable, and no article, if an operator stands directly before it, or after it with or
# without blanks: "a-5", "a = 5". A known error: in "a -5 degree slope" the article is kept.
STRICT_ARTICLES = re.compile(r"\b(an|the|(?<![-+/=^<>≤≥≠*])a(?!\s*[-+/=^<>≤≥≠*#]))\b")

# NFKC, Unicode's compatibility form, lacks these plain forms: minus, two slashes, times, two apostrophes.
PLAIN = {"\u2212": "-", "\u2044": "/", "\u2215": "/", "\u00d7": "x", "\u02bb": "'", "\u02bc": "'"}
# NFKC alone would turn 10³ into 103, 2ⁿ into 2n and 3½ into 31/2.
SUPERSCRIPT = re.compile("([²³¹⁰-ⁿ]+)")
FRACTION_AFTER_DIGIT = re.compile(r"(?<=\d)([¼-¾⅐-⅞])")
COMPARISONS = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "="}

LETTER = r"[^\W\d_]"
# A lower-case letter alone, but not the s of "it's", whose apostrophe may have become '"' (`_plain_form`).
VARIABLE = rf"(?<!{LETTER})(?<!{LETTER}['\"])[a-zα-ω](?!{LETTER})"  # x, and the x of 2x
SINGLE_LETTER = rf"(?<!{LETTER}){LETTER}(?!{LETTER})"

MATHS_WORD = r"(?:\\[a-z]|(?:pi|sqrt|sin|cos|tan|log|ln|exp)\b)"
# Beside an operator: a variable, or a word of mathematics that can stand there.
NAME_BEFORE = rf"(?:(?<={VARIABLE})|(?<=\bpi))"
NAME_AFTER = rf"(?:{VARIABLE}|{MATHS_WORD})"

# Blanks beside an operator do not count: "F = ma" equals "F=ma". So an operator joins its neighbours into one
# word, also in prose: "Disney + Pixar" has no word in common with "Pixar".
#
# The operators / = + ^ join *things*: words, numbers, brackets, roots, LaTeX commands, amounts in dollars. A
# minus and the comparisons join *operands*, which are fewer: numbers, brackets, variables, and MATHS_WORD. A
# product of letters is a thing and no operand, so "3 - ab" equals "3 ab".
THING_BEFORE = r"(?<=[\w)}\]])"
THING = r"(?:[\w({\\√∞]|\.\d|\$[\w({\\.-])"
THING_AFTER = rf"(?=-?{THING})"
OPERAND_BEFORE = rf"(?:(?<=[\d)}}\]∞|])|{NAME_BEFORE})"
OPERAND_AFTER = rf"(?=-?(?:[\d({{.√∞|]|{NAME_AFTER}))"
# An operator, with the blanks beside it.
OPERATORS = (
    rf"{THING_BEFORE}\s*[/=^]\s*{THING_AFTER}",  # km / h, F = ma, and MathQA's 33 1 / 3
    # Blanks may follow a plus only if others precede it: Disney + Pixar, but not Canal+ Group.
    rf"{THING_BEFORE}(?:\s*\+|\s+\+\s+){THING_AFTER}",
    rf"{OPERAND_BEFORE}\+\s+{THING_AFTER}",  # 2x+ y
    rf"{THING_BEFORE}\s+\*\*\s+{THING_AFTER}",  # x ** 2, but not **bold** text
    rf"{OPERAND_BEFORE}\s*[-<>≤≥≠]\s*{OPERAND_AFTER}",  # x - 1, 3 - sqrt(2), but not World War I - 1914
    rf"(?<={SINGLE_LETTER})\s*[<>≤≥≠]\s*{OPERAND_AFTER}",  # T > 0, so that T > 1 has no word in common
    rf"(?<=\b{LETTER})\s*-\s*(?={LETTER}\b(?!\s+\w))",  # A - B, but not "A - B team"
)
INFIX = re.compile("|".join(OPERATORS))
SIGN = re.compile(rf"((?:^|[=({{\[,:<>≤≥≠^/])\s*-)\s+(?=[\d.$(\\]|{VARIABLE})")  # - 5, x = - 5
ARTICLE_AFTER_OPERATOR = re.compile(r"(?<=[-+/=]\s)\s*(?:a|(?i:an|the))\s+(?=\w)")
COMPARISON_BEFORE_NUMBER = re.compile(r"([<>≤≥≠])\s+(?=[\d.-])")
WORD_BEFORE_COMPARISON = re.compile(rf"(?<={LETTER}{LETTER})\s*(?=[<>≤≥≠][\d.-])")

# A comma before exactly three digits (1,234). In India, groups of two digits may come before them (1,00,000).
THOUSANDS = re.compile(r"(?<=\d),(?=(?:\d\d,){0,4}\d{3}(?!\d))")

# The places in which punctuation carries a value, and is kept.
KEPT = "|".join(
    (
        # Minus. In any other place a hyphen is dropped: in a name ("F-16", "COVID-19"), and as a dash
        # ("World War I - 1914"). A capital letter makes a name, so "X-1" is no difference. But "x-1" equals
        # "X-1", because two texts are also compared in lower case.
        r"(?<![\w-])-(?=[^\s-])",  # the sign of -5 and of -\frac{1}{2}, and the minus of (x+1)-y
        r"(?<=\d[eE])-(?=\d)",  # 1e-5
        rf"(?<=\b{LETTER})-(?={LETTER}\b)",  # x-y, A-B
        rf"{NAME_BEFORE}-(?=\d|{NAME_AFTER})",  # x-1, 2x-3, 2x-y, x-cos x, pi-2
        rf"(?<=\d)-(?={NAME_AFTER})",  # 2-x, 3-sqrt(2)
        r"(?<=\^\d)-(?=\d)",  # x^2-1, but not 18-20
        r"(?<=\w)-(?=[^\w-]|$)",  # x-(y+1), and the blood type O-
        r"(?<=\^)-",  # the charge of Cl⁻
        # Decimal point.
        r"(?<=\d)\.(?=\d)",  # 3.14
        r"(?<![\w.])\.(?=\d)",  # .5
        # Slash and equals sign.
        rf"(?<=[\w)}}\]])[/=](?=-|{THING})",  # 1/2, (x+1)/y, km/h, x=5
        # Plus: 2x+3, C++, and a sign after a blank, but not the signs of 1e+5, (+5), and +5 at the start.
        r"(?<=[\w)}\]+ ])(?<!\d[eE])\+",
        r"(?<=\^)\+(?!\d)",  # the charge of Na⁺
        # Powers and comparisons. The signs ≤ ≥ ≠ are not in string.punctuation, so nothing drops them.
        r"[\^<>]",  # x^2, <5
        r"(?<=[\w)}\]])\*\*(?=[\w({\\])",  # x**2
        # Number sign.
        rf"(?<={LETTER})#",  # C#
    )
)
# Between two digits, + . / < > ^ belong to one value. All other punctuation there counts as a blank, unless
# it is kept: "18-20" equals "18 20". So does a comma between words: "red,blue" equals "red blue".
OTHER = re.escape("".join(mark for mark in string.punctuation if mark not in "+./<>^"))
SEPARATOR = (
    rf"(?<=\d)(?:(?!{KEPT})[{OTHER}])+?(?=-?\d)"  # 18-20, 3:2
    r"|(?<=\w),(?=\w)"  # red,blue
)
PUNCTUATION = re.compile(f"(?P<kept>{KEPT})|(?P<separator>{SEPARATOR})|[{re.escape(string.punctuation)}]")
