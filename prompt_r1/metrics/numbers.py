"""Compare two answers as numbers: 1/2, 0.5, 50 %, \\frac{1}{2}, \\boxed{.5} and "Answer: 0.5" are equal.

The comparison is exact: a rounded decimal does not equal the fraction (33.33 is not 33 1/3). Roots and π are
compared as floating-point numbers. An answer is an expression without variables; words that lead to it
("The answer is", "x ="), a currency before it and a unit after it are allowed, any other words are not.

Why not math-verify: of the pairs in tests/metrics/test_math_pairs.py, version 0.9.0 misses 103 of the 273
that are equal and accepts 84 of the 182 that are not; this module misses 7 and accepts none.
"""

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from prompt_r1.metrics.expressions import evaluate

LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[()\[\]!,;: ])|~|\\\\|(?<!\d)\*\*|\*\*(?!\d)")
FRACTION_COMMAND = re.compile(r"\\[dtc]?frac\b|\\[dtc]?frac(?=\d)")
BARE_ARGUMENT = re.compile(r"(\\frac|\}|\\sqrt)\s*(\d)")  # \frac12, \frac1{2}, \sqrt3: as TeX reads them
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|fbox|operatorname)\s*\{([^{}]*)\}")
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°")
VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁻]+")
DOLLAR = "\N{FULLWIDTH DOLLAR SIGN}"  # the currency, as opposed to TeX's $
TIMES_TEN = re.compile(r"(?<=\d)\s*x\s*(?=10\s*\^)")
NO_PAISE = re.compile(r"(?<=\d)/-\s*$")  # Rs. 1200/-
RATIO = re.compile(r"(?<=\d) to (?=\d)")
HTML_TAG = re.compile(r"</?[a-z]{1,6}>")
SYMBOLS = {
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{FRACTION SLASH}": "/", "×": "*", "·": "*",
    "⋅": "*", "÷": "/", "√": r"\sqrt ", "π": r"\pi ", "≈": r"\approx ", "{,}": ",", r"\%": "%",
    r"\times": "*", r"\cdot": "*", r"\$": DOLLAR, "US$": DOLLAR,
}  # fmt: skip

# What may lead to the number: "The answer is", "x =", "m + n =", "Answer:", "There are", an option's letter.
LEAD = re.compile(r"(?P<words>[^=:：]*?)(?:\b(?:is|are|equals)\b|[=:：]|是|为)[\s*:：=]*(?P<rest>\S(?s:.*))")
NAMES_THE_ANSWER = re.compile(r"\banswer\b|答案")
NO_LEAD = re.compile(
    r"\b(?:not|no|half|twice|double|than|least|most|or|between|if|times|wrong|incorrect)\b|n't"
)
ARGUMENT = re.compile(r"\([^()]*\)|_\{?\w+\}?")  # of a function, or an index: f(2), S_3
CONJUNCTION = re.compile(r"(?:so|thus|hence|therefore|then|finally)\b[\s,]*")
# "e ) 30" (in MathQA), "#### 30" (in GSM8K)
OPTION = re.compile(r"#{2,}\s*|(?:option\s*)?\(?[a-e]\s*\)\s*(?=[^\s)])")
ABOUT = re.compile(r"(?:approximately|about|around|roughly|exactly|approx\b\.?|\\approx)\s*")

CURRENCY = rf"(rs\s*\.?|inr|usd|eur|€|£|¥|₹|{DOLLAR}|)"
HEAD = re.compile(rf"([+-]|minus|negative)?\s*{CURRENCY}\s*(?=[+-]|[\d.(\\]|sqrt|pi)")
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
LENGTH = r"(?:[cdkm]?m|ft|feet|foot|inch(?:es)?|yards?|(?:centi|kilo|milli)?met(?:re|er)s?)"
POWER_OF_UNIT = re.compile(rf"\b({LENGTH})\s*(?:\^\s*)?\{{?([23])\}}?")
UNIT = re.compile(rf"[a-z .%/'€£¥₹{DOLLAR}]*")
# Words that change the number or start another one.
NO_UNIT = re.compile(
    r"\b(?:and|or|to|not|if|is|than|by|times(?= )|plus|minus|over|point|half|wrong|incorrect|st|nd|rd|th"
    rf"|{'|'.join(SCALES)})s?\b"
)
UNITS = {
    "%": "percent", "per cent": "percent", "deg": "degree", "rs": "rupee", "inr": "rupee", "₹": "rupee",
    "usd": "dollar", DOLLAR: "dollar", "eur": "euro", "€": "euro", "£": "pound", "¥": "yen", "h": "hour",
    "hr": "hour", "min": "minute", "s": "second", "sec": "second", "m": "meter", "metre": "meter",
    "km": "kilometer", "kilometre": "kilometer", "cm": "centimeter", "centimetre": "centimeter",
    "mm": "millimeter", "millimetre": "millimeter", "feet": "foot", "ft": "foot", "inche": "inch",
    "in": "inch", "kg": "kilogram", "g": "gram", "l": "litre", "liter": "litre", "kmph": "kilometer / hour",
    "kph": "kilometer / hour", "mph": "mile / hour", "per": "/", "sq": "square",
}  # fmt: skip
AREAS = {"2": "square", "3": "cubic"}


@dataclass(frozen=True)
class Number:
    """A value, exact or (with roots and π) floating, and its unit ("": none was given)."""

    value: Fraction | float
    unit: str


def same_number(prediction: str, gold: str) -> bool:
    """Whether both are numbers of the same value.

    Units are compared only if both answers have one. A percentage also equals the number without the percent
    sign: 50 % equals 50 and 0.5.
    """
    predicted, wanted = parse_number(prediction), parse_number(gold)
    if predicted is None or wanted is None:
        return False
    units = {predicted.unit, wanted.unit}
    if units == {"", "percent"}:
        percentage, plain = (predicted, wanted) if predicted.unit == "percent" else (wanted, predicted)
        return _equal(plain.value, percentage.value) or _equal(plain.value, percentage.value / 100)
    if units == {"cent", "dollar"}:
        cents, dollars = (predicted, wanted) if predicted.unit == "cent" else (wanted, predicted)
        return _equal(cents.value, dollars.value * 100)
    return _equal(predicted.value, wanted.value) and (len(units) == 1 or "" in units)


def _equal(a: Fraction | float, b: Fraction | float) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    try:
        return math.isclose(a, b, rel_tol=1e-9)
    except OverflowError:
        return False


def parse_number(answer: str) -> Number | None:
    """Parse an answer that is a number; None if it is not exactly one number."""
    if re.search(r"\d\s?[KMB]\b", answer):
        return None  # 5M may be 5 million or 5 metres
    text = without_lead(remove_layout(answer[-2_000:]).lower()).strip().rstrip(" .。")
    head = HEAD.match(text)
    if head is None:
        return None
    found = evaluate(text[head.end() :])
    if found is None:
        return None
    value, rest = found.value, found.rest.strip(" .。")
    scale = re.match(rf"({'|'.join(SCALES)})s?\b", rest)
    if scale:
        value, rest = value * SCALES[scale[1]], rest[scale.end() :].strip()
    unit = _unit_of(rest)
    if unit is None:
        return None
    negative = head[1] not in (None, "+")
    currency = head[2].rstrip(" .")
    return Number(-value if negative else value, UNITS.get(currency, "") or unit)


def without_lead(text: str) -> str:
    """The part of a lower-case text after the words that lead to its answer, such as "the answer is"."""
    start = max(text.rfind("answer"), text.rfind("答案"))
    begin = max(text.rfind(mark, 0, max(start, 0)) for mark in ("\n", ". "))
    text = text[begin + 1 :].strip().rstrip(" .")
    text = _without_start(CONJUNCTION, text)
    for _ in range(3):
        found = LEAD.fullmatch(text)
        if not found or not _may_lead(found["words"]):
            break
        text = found["rest"]
        *steps, last = text.split("=")
        if steps and not re.search(r"[a-z,;]", "".join(steps).replace(r"\frac", "")):
            text = last  # x = 68/2 = 34
    for pattern in (OPTION, ABOUT):
        text = _without_start(pattern, text.strip())
    return text.strip()


def _without_start(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.match(text)
    return text[found.end() :] if found else text


def _may_lead(words: str) -> bool:
    """Whether these words may lead to the answer: they name it, or they contain no other number."""
    plain = ARGUMENT.sub("", words)
    if NO_LEAD.search(plain):
        return False
    return bool(NAMES_THE_ANSWER.search(plain)) or not re.search(r"[\d,;^<>|\n]", plain)


def remove_layout(answer: str) -> str:
    """Reduce LaTeX to plain text: take the last \\boxed, drop delimiters and Markdown.

    Fractions become \\frac{a}{b} with braces, powers a^{b}. A dollar sign that delimits no formula is money.
    """
    text = _boxed(answer)
    text = SUPERSCRIPT.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = "".join(unicodedata.normalize("NFKC", sign) if "！" <= sign <= "～" else sign for sign in text)
    for symbol, plain in SYMBOLS.items():
        text = text.replace(symbol, plain)
    text = text.replace("$", "" if text.count("$") % 2 == 0 else DOLLAR)
    text = RATIO.sub(":", text)
    text = TIMES_TEN.sub("*", NO_PAISE.sub("", HTML_TAG.sub("", text)))
    text = DEGREES.sub(" degrees ", TEXT_COMMAND.sub(r" \1 ", text))
    text = FRACTION_COMMAND.sub(r"\\frac", LAYOUT.sub(" ", text))
    for _ in range(2):
        text = BARE_ARGUMENT.sub(r"\1{\2}", text) if r"\frac" in text or r"\sqrt" in text else text
    text = VULGAR_FRACTION.sub(
        lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("\N{FRACTION SLASH}", "/"), text
    )
    text = "\n".join(" ".join(line.split()) for line in text.splitlines()).strip(" \n\"'“”`*_")
    enclosed = text.startswith("(") and text.find(")") == len(text) - 1
    return text[1:-1].strip() if enclosed else text


def _boxed(answer: str) -> str:
    """The content of the last \\boxed{…}; the whole answer if there is none or it is not closed."""
    start = answer.rfind(r"\boxed{")
    if start < 0:
        return answer
    depth, begin = 1, start + len(r"\boxed{")
    for position in range(begin, len(answer)):
        if answer[position] == "{":
            depth += 1
        elif answer[position] == "}":
            depth -= 1
        if depth == 0:
            return answer[begin:position]
    return answer


def _unit_of(text: str) -> str | None:
    """The normalised unit in the text after a number ("": no unit); None if it is not a unit: "x", "or 6"."""
    text = POWER_OF_UNIT.sub(lambda found: f"{AREAS[found[2]]} {found[1]}", text)
    if not UNIT.fullmatch(text) or NO_UNIT.search(text):
        return None
    words = re.sub(r"[.']", " ", text.replace("/", " / ")).split()
    words = [UNITS.get(word, word.removesuffix("s")) for word in words]
    words = [UNITS.get(word, word) for word in words]
    variable = any(len(word) == 1 and word.isalnum() for word in words[:1])
    if variable or len(words) > 5:
        return None
    unit = " ".join(words)
    return UNITS.get(unit, unit)
