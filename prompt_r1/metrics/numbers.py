r"""Compare answers as numbers: 1/2 and 50 % are equal.

Covered are fractions and mixed numbers, decimals, thousands, percentages, a currency sign before the number,
and the words that lead to it: "Answer: 34" as DAPO asks for it, "The answer is 34.", "x = 34". The comparison
is exact: a rounded decimal does not equal the fraction (33.33 is not 33 1/3). A unit or any other word after
the number must be in both answers. For roots, powers, sets and units see `with_math_verify.py`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[()\[\]!,;: ])|\*\*|`|~")
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|fbox|operatorname)\s*\{([^{}]*)\}")
BARE_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)")  # \frac12 as TeX reads it
PLAIN_FRACTION = re.compile(r"\\frac\{\s*([-\d.,]+)\s*\}\{\s*([-\d.,]+)\s*\}")
SYMBOLS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    "{,}": ",",
    r"\%": "%",
}
ESCAPED_DOLLAR = re.compile(r"\\\$|US\$")

# "Answer: 34", "So the answer is 34" on the last line that says so; DAPO's Chinese problems have 答案.
ANSWER = re.compile(
    r"(?:^|\n|[.:] )\W*(?:(?:so|thus|hence|therefore|the|my|final|correct)\W+)*(?:answer|答案)"
    r"(?:\s+is\b|是|为)?[\s:：=*]*",
    re.IGNORECASE,
)
# "x =", "It is", "The value of m + n is": words and names without a number, and no unary minus.
LEAD = re.compile(r"(?:\w+, )?(?:[a-z][a-z '+-]*)?(?:\b(?:is|are|was|were|equals)\b|=)\s*", re.IGNORECASE)
NO_LEAD = re.compile(r"\b(?:half|twice|double|no|not|than)\b", re.IGNORECASE)

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,50})"
DECIMAL = rf"(?:{INTEGER}(?:\.\d{{0,50}})?|\.\d{{1,50}})"
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<currency>[$€£¥₹]?)\s*(?P<second_sign>[+-]?)\s*"
    rf"(?:(?P<whole>{INTEGER})\s+(?=\d+\s*/))?(?P<number>{DECIMAL})(?:\s*/\s*(?P<denominator>-?{DECIMAL}))?"
    rf"\s*(?P<unit>%|[^\W\d_][^\d]*)?"
)


@dataclass(frozen=True)
class Number:
    """A value, and what is said of it: % or the words after it, and the currency before it ("": nothing)."""

    value: Fraction
    unit: str
    currency: str


def same_number(prediction: str, gold: str) -> bool:
    """Whether both are numbers of the same value, with the same words after them.

    A percentage also equals the number without the percent sign: 50 % equals 50 and 0.5. Currencies are
    compared only if both answers have one.
    """
    predicted, wanted = parse_number(prediction), parse_number(gold)
    if predicted is None or wanted is None:
        return False
    if predicted.currency and wanted.currency and predicted.currency != wanted.currency:
        return False
    units = {predicted.unit, wanted.unit}
    if units == {"", "%"}:
        percentage, plain = (predicted, wanted) if predicted.unit else (wanted, predicted)
        return not plain.currency and plain.value in (percentage.value, percentage.value / 100)
    return len(units) == 1 and predicted.value == wanted.value


def parse_number(answer: str) -> Number | None:
    """Parse an answer that is a number; None if it is not exactly one number."""
    text = PLAIN_FRACTION.sub(r" \1/\2", without_lead(remove_layout(answer[-2_000:]))).strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    found = NUMBER.fullmatch(text)
    if found is None:
        return None
    value = _fraction(found["number"])
    if found["denominator"]:
        denominator = _fraction(found["denominator"])
        if not denominator:
            return None
        value /= denominator
    if found["whole"]:
        value += _fraction(found["whole"])
    if "-" in (found["sign"], found["second_sign"]):
        value = -value
    unit = (found["unit"] or "").lower().strip()
    return Number(value, "%" if unit in ("percent", "per cent") else unit, found["currency"])


def without_lead(text: str) -> str:
    """The part of a text after the words that lead to its answer, such as "The answer is"."""
    answers = list(ANSWER.finditer(text))
    if answers:
        text = text[answers[-1].end() :]
    lead = LEAD.match(text)
    if lead and not NO_LEAD.search(lead[0]):
        text = text[lead.end() :]
    return text.strip().rstrip(" .。")


def remove_layout(answer: str) -> str:
    """Reduce LaTeX to plain text: take the last \\boxed, drop delimiters, text commands and Markdown.

    Fractions become \\frac{a}{b} with braces. A dollar sign that delimits no formula is money.
    """
    text = _boxed(answer)
    for symbol, plain in SYMBOLS.items():
        text = text.replace(symbol, plain)
    text = TEXT_COMMAND.sub(r" \1 ", ESCAPED_DOLLAR.sub("\N{FULLWIDTH DOLLAR SIGN}", text))
    if text.count("$") % 2 == 0:
        text = text.replace("$", "")
    text = LAYOUT.sub("", text.replace("\N{FULLWIDTH DOLLAR SIGN}", "$"))
    text = BARE_FRACTION.sub(
        lambda found: rf"\frac{{{found[1].strip('{}')}}}{{{found[2].strip('{}')}}}", text
    )
    return "\n".join(" ".join(line.split()) for line in text.splitlines()).strip(" \n\"'“”")


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").removesuffix("."))


def _boxed(answer: str) -> str:
    """The content of the last \\boxed{…}; the whole answer if there is none or it is not closed."""
    start = answer.rfind(r"\boxed{")
    if start < 0:
        return answer
    depth, begin = 1, start + len(r"\boxed{")
    for position in range(begin, len(answer)):
        depth += {"{": 1, "}": -1}.get(answer[position], 0)
        if depth == 0:
            return answer[begin:position]
    return answer
