"""Evaluate an arithmetic expression: 3 1/2, 10^3, 5!, \\frac{1}{2}, 2\\sqrt{3}, 3:2.

The text is lower-case and without layout (`numbers.remove_layout`). Python itself never evaluates it, and
the size of all values is limited.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?![\d/ ])|\d{1,50})"
TOKEN = re.compile(
    rf"\s*(?:(?P<number>{INTEGER}(?:\.\d{{0,50}})?(?![\d,]*\.\d)|\.\d{{1,50}})(?P<power>e[+-]?\d{{1,3}}(?![\da-z]))?"
    r"|(?P<word>\\frac|\\sqrt|\\pi|sqrt\b|pi\b)|(?P<symbol>[-+*/:^!(){}]))"
)
MIXED = re.compile(r"\s+(\d{1,50})\s*/\s*(\d{1,50})(?![\d.,/]*\d)")
MOST_NUMBERS = 50  # in an expression
LARGEST_POWER = 10_000  # bits; more would take long to compute
LARGEST_FACTORIAL = 100


class NoNumber(Exception):
    """A text is not an expression that this module can read."""


@dataclass(frozen=True)
class Evaluated:
    """The value of an expression, exact or (with roots and π) floating, and the text after it."""

    value: Fraction | float
    rest: str


def evaluate(text: str) -> Evaluated | None:
    """The value of the longest expression at the start of a text; None if there is none."""
    parser = _Parser(text)
    try:
        value = parser.sum()
    except (NoNumber, ZeroDivisionError, OverflowError):
        return None
    return Evaluated(value, text[parser.position :])


class _Parser:
    """Evaluates the longest expression at the start of a text, by recursive descent.

    Exact values are Fractions; roots, π and fractional powers are floats. Raises NoNumber if there is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._numbers = 0

    def sum(self) -> Fraction | float:
        """product {(+|-) product}. "18-20" is a range: whole numbers are not subtracted."""
        value = self._product()
        while True:
            start = self.position
            sign = self._take("+", "-")
            if not sign:
                return value
            try:
                right = self._product()
            except NoNumber:
                self.position = start
                return value
            if sign == "-" and isinstance(value, Fraction) and isinstance(right, Fraction):
                raise NoNumber
            value = value + right if sign == "+" else value - right

    def _product(self) -> Fraction | float:
        """[-] power {(*|/|:) power}, or a factor without a sign before a bracket, a root or π."""
        negative = self._take("+", "-") == "-"
        value, divided = self._power(), False
        while True:
            start = self.position
            operator = self._take("*", "/", ":")
            if not operator and not self._at("(", r"\sqrt", r"\pi", "sqrt", "pi"):
                break
            try:
                right = self._power(signed=bool(operator))
            except NoNumber:
                self.position = start
                break
            if operator in ("/", ":"):
                if divided:
                    raise NoNumber  # 3:2:1, 12/25/2020
                value, divided = value / right, True
            else:
                value = value * right
        return -value if negative else value

    def _power(self, *, signed: bool = False) -> Fraction | float:
        """[-] atom [!] [^ power]"""
        negative = signed and self._take("+", "-") == "-"
        value = self._atom()
        if self._take("!"):
            if not isinstance(value, Fraction) or value not in range(LARGEST_FACTORIAL + 1):
                raise NoNumber
            value = Fraction(math.factorial(int(value)))
        if self._take("^"):
            value = _raised(value, self._braced() if self._at("{") else self._power(signed=True))
        return -value if negative else value

    def _atom(self) -> Fraction | float:
        """A number, also a mixed one; a bracket, a fraction, a root, π."""
        self._numbers += 1
        if self._numbers > MOST_NUMBERS:
            raise NoNumber
        found = TOKEN.match(self.text, self.position)
        if found is None:
            raise NoNumber
        if found["number"]:
            self.position = found.end()
            number = Fraction(re.sub("[, ]", "", found["number"]).removesuffix("."))
            if found["power"]:
                return _raised(Fraction(10), Fraction(found["power"][1:])) * number
            return number + self._fraction_after() if number.denominator == 1 else number
        if self._take(r"\frac"):
            return self._braced() / self._braced()
        if self._take(r"\sqrt", "sqrt"):
            inside = self._braced() if self._at("{") else self._atom()
            if inside < 0:
                raise NoNumber
            return math.sqrt(inside)
        if self._take(r"\pi", "pi"):
            return math.pi
        if not self._take("("):
            raise NoNumber
        value = self.sum()
        if not self._take(")"):
            raise NoNumber
        return value

    def _fraction_after(self) -> Fraction:
        """The fraction of a mixed number: 3 1/2, 3\\frac{1}{2}; otherwise 0."""
        start = self.position
        if self._take(r"\frac"):
            value = self._braced() / self._braced()
            if isinstance(value, Fraction) and value >= 0:
                return value
            raise NoNumber
        if found := MIXED.match(self.text, self.position):
            self.position = found.end()
            return Fraction(int(found[1]), int(found[2]))
        self.position = start
        return Fraction(0)

    def _braced(self) -> Fraction | float:
        if not self._take("{"):
            raise NoNumber
        value = self.sum()
        if not self._take("}"):
            raise NoNumber
        return value

    def _take(self, *tokens: str) -> str:
        """The next token if it is one of these, which is then consumed; otherwise nothing."""
        found = TOKEN.match(self.text, self.position)
        if found is None or found[0].strip() not in tokens:
            return ""
        self.position = found.end()
        return found[0].strip()

    def _at(self, *tokens: str) -> bool:
        start = self.position
        taken = self._take(*tokens)
        self.position = start
        return bool(taken)


def _raised(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = base.numerator.bit_length() + base.denominator.bit_length()
        if bits * abs(exponent) > LARGEST_POWER:
            raise NoNumber
        return Fraction(base**exponent.numerator)
    if base < 0:
        raise NoNumber
    return float(float(base) ** float(exponent))
