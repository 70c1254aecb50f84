"""Compare two answers as numbers: 1/2, 0.5, 50 %, \\frac{1}{2}, \\boxed{.5} and "$ 0.50" are equal.

The comparison is exact: a rounded decimal does not equal the fraction (33.33 is not 33 1/3). A unit may
follow the number and a currency may precede it; an answer with any other words is not a number.

Why not math-verify: of the pairs in tests/metrics/test_numbers.py, version 0.9 misses 179 of the 461 that are
equal and accepts 10 of the 48 that are not.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[()\[\]!,;: $])|[$~]")
FRACTION_COMMAND = re.compile(r"\\[dtc]?frac\b|\\[dtc]?frac(?=\d)")
FRACTION_BRACES = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
FRACTION_DIGITS = re.compile(r"\\frac\s*(\d)\s*(\d)")  # \frac12, as TeX reads it
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°")
VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
OPTION_OR_NAME = re.compile(r"^(?:[a-e]\s*\)|[a-z]\s*=)\s*(?=\S)")  # "e ) 30" (in MathQA), "x = 5"

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,50})"
DECIMAL = rf"(?:{INTEGER}(?:\.\d{{0,50}})?|\.\d{{1,50}})"
SIGNED = rf"\(?\s*([+-]?)\s*({DECIMAL})\s*\)?"
QUOTIENT = re.compile(rf"{SIGNED}\s*[/:]\s*{SIGNED}")
MIXED = re.compile(rf"({INTEGER})\s*(?:\s|\+)\s*\(?\s*\(?({INTEGER})\)?\s*/\s*\(?({INTEGER})\)?\s*\)?")
POWER = re.compile(rf"({DECIMAL})\s*(?:\\times|\\cdot|[×*·x])\s*10\s*\^\s*[{{(]?\s*(-?\d{{1,3}})\s*[}})]?")
PLAIN = re.compile(rf"({DECIMAL})(?:e([+-]?\d{{1,3}}))?(?![\d/:])")
HEAD = re.compile(r"([+-]?)\s*(rs\s*\.?|inr|usd|eur|€|£|¥|₹|)\s*([+-]?)\s*")
LENGTH = r"(?:[cdkm]?m|ft|feet|inch(?:es)?|(?:centi|kilo|milli)?met(?:re|er)s?)"
UNIT = re.compile(rf"(?:[a-z .%/']*\b{LENGTH}\s*(?:\^\s*)?\{{?[23]\}}?|[a-z .%/']*)")
# Words that change the number or start another one.
NO_UNIT = re.compile(
    r"\b(?:and|or|to|not|if|is|than|by|times|plus|minus|over|point|half|dozen|hundred|thousand|[mbtr]+illion)s?\b"
)

UNITS = {
    "%": "percent", "per cent": "percent", "deg": "degree", "sq": "square",
    "rs": "rupee", "inr": "rupee", "₹": "rupee", "usd": "dollar", "eur": "euro", "€": "euro", "£": "pound",
    "¥": "yen", "h": "hour", "hr": "hour", "min": "minute", "s": "second", "sec": "second", "kmph": "km/h",
    "m": "meter", "metre": "meter", "km": "kilometer", "kilometre": "kilometer", "cm": "centimeter",
    "centimetre": "centimeter", "mm": "millimeter", "feet": "foot", "ft": "foot", "inche": "inch",
    "kg": "kilogram", "g": "gram", "l": "litre", "liter": "litre",
}  # fmt: skip


@dataclass(frozen=True)
class Number:
    """A value and its unit ("": none was given)."""

    value: Fraction
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
        return plain.value in (percentage.value, percentage.value / 100)
    return predicted.value == wanted.value and (len(units) == 1 or "" in units)


def parse_number(answer: str) -> Number | None:
    """Parse an answer that is a number; None if it is not exactly one number."""
    text = OPTION_OR_NAME.sub("", remove_layout(answer[-2_000:]).lower()).lstrip().rstrip(" .")
    head = HEAD.match(text)
    assert head is not None, "every part of the pattern is optional"
    parsed = _value_of(text[head.end() :])
    if parsed is None:
        return None
    value, rest = parsed
    unit = _unit_of(rest.strip(" .)"))
    if unit is None:
        return None
    negative = (head[1] == "-") != (head[3] == "-")
    return Number(-value if negative else value, unit or UNITS.get(head[2].rstrip(" ."), ""))


def remove_layout(answer: str) -> str:
    """Reduce LaTeX to plain text: take the last \\boxed, write fractions as a/b, drop dollar signs."""
    text = _boxed(answer).replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = DEGREES.sub(" degrees ", TEXT_COMMAND.sub(r" \1 ", text.replace(r"\%", "%")))
    text = FRACTION_COMMAND.sub(r"\\frac", LAYOUT.sub(" ", text))
    text = FRACTION_BRACES.sub(r" (\1)/(\2) ", FRACTION_DIGITS.sub(r" \1/\2 ", text))
    text = VULGAR_FRACTION.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = " ".join(text.replace("\N{FRACTION SLASH}", "/").split())
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


def _value_of(text: str) -> tuple[Fraction, str] | None:
    """The number at the start of a text, and the text after it; None if there is no number."""
    if found := MIXED.match(text):
        whole, above, below = (_fraction(part) for part in found.groups())
        return (whole + above / below, text[found.end() :]) if below else None
    if found := QUOTIENT.match(text):
        above, below = _fraction(found[2]), _fraction(found[4])
        sign = -1 if (found[1] == "-") != (found[3] == "-") else 1
        return (sign * above / below, text[found.end() :]) if below else None
    if found := POWER.match(text):
        return _fraction(found[1]) * Fraction(10) ** int(found[2]), text[found.end() :]
    if found := PLAIN.match(text):
        return _fraction(found[1]) * Fraction(10) ** int(found[2] or 0), text[found.end() :]
    return None


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").removesuffix("."))


def _unit_of(text: str) -> str | None:
    """The normalised unit in the text after a number ("": no unit); None if it is not a unit: "x", "or 6"."""
    if not UNIT.fullmatch(text) or NO_UNIT.search(text):
        return None
    words = [UNITS.get(word, word.removesuffix("s")) for word in re.sub(r"[.{}^]", " ", text).split()]
    words = [UNITS.get(word, word) for word in words]
    variable = any(len(word) == 1 and not word.isdigit() for word in words[:1])
    if variable or len(words) > 4:
        return None
    unit = " ".join(words)
    return UNITS.get(unit, unit)
