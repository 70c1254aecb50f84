"""`math` accepts every spelling of a number that it reads, and no different answer."""

import time
from fractions import Fraction

import pytest

from prompt_r1.metrics.em_f1 import math_match
from prompt_r1.metrics.numbers import parse_number


@pytest.mark.parametrize(
    "spellings",
    [
        ["1/2", "0.5", ".5", "0.50", r"\frac{1}{2}", r"$\dfrac12$", r"\boxed{\tfrac{1}{2}}", r"\(.5\)"],
        ["33 1 / 3 %", "33 1/3", r"33\frac{1}{3}\%", "100/3", "33 1/3 percent", r"\frac{100}{3}"],
        ["-3", "−3", "(-3)", "- 3", "-3.0", "$-3$", r"\boxed{-3}", r"-\frac{6}{2}", "6/-2", "x = -3"],
        ["24,960", "24960", r"24{,}960", r"24\,960", "24,960.00", "$24,960", r"\$24,960"],
        ["27.6 miles", "27.60 Miles", "The distance is 27.6 miles."],
        ["none", "None.", "none"],
    ],
)  # fmt: skip
def test_math_accepts_every_spelling_of_the_same_number(spellings: list[str]) -> None:
    for prediction in spellings:
        for gold in spellings:
            assert math_match(prediction, ["other", gold]) == 1, (prediction, gold)


@pytest.mark.parametrize(
    ("answer", "value", "unit"),
    [
        ("-4", -4, ""),
        ("+4", 4, ""),
        ("$ -3", -3, ""),
        ("-$3", -3, ""),
        ("US$ 7", 7, ""),
        ("3 0/5", 3, ""),
        ("-3 1/2", Fraction(-7, 2), ""),
        ("1,234.50", Fraction(2469, 2), ""),
        ("5 kg", 5, "kg"),
        ("5 per cent", 5, "%"),
        ("(7)", 7, ""),
        ("(7) (8)", None, None),
        ("12,34", None, None),
        ("1/0", None, None),
        ("1/2/3", None, None),
        ("18-20", None, None),
        ("5!", None, None),
        ("not 8", None, None),
        ("there are 5 of 8 = 3", None, None),
        ("answer: 3\nanswer: 4", 4, ""),
        ("First 5 + 6 = 11.\n\nAnswer: $11$", 11, ""),
        ("x" * 3_000 + "\nanswer: 4", 4, ""),
        ("9" * 50, int("9" * 50), ""),
        ("9" * 51, None, None),
    ],
)
def test_a_number_is_read_with_its_sign_and_unit(answer, value, unit):
    found = parse_number(answer)
    assert (found and found.value, found and found.unit) == (value, unit)


@pytest.mark.parametrize(
    "text",
    ["(" * 5_000, "1/" * 5_000, r"\frac{" * 5_000, r"\frac1" * 5_000, "is " * 10_000 + "\nx",
     "1 000 " * 2_000, "answer is " * 5_000, "so the " * 5_000, "1 " * 5_000, r"\boxed{" * 5_000],
)  # fmt: skip
def test_hostile_answers_are_judged_quickly(text: str) -> None:
    started = time.process_time()
    assert math_match(text, ["5"]) == 0
    assert time.process_time() - started < 1  # takes milliseconds
