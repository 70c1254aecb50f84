"""`math` accepts every spelling of a number and no different answer."""

import pytest

from prompt_r1.metrics.numbers import parse_number, same_number
from prompt_r1.metrics.text import math_match


@pytest.mark.parametrize(
    "spellings",
    [
        [
            "1/2",
            "0.5",
            ".5",
            "0.50",
            r"\frac{1}{2}",
            r"$\dfrac12$",
            r"\boxed{\tfrac{1}{2}}",
            "½",
            "2/4",
            r"\(.5\)",
        ],
        ["33 1 / 3 %", "33 1/3", r"33\frac{1}{3}\%", "100/3", "33⅓ percent", r"\frac{100}{3}"],
        ["78 + ( 4 / 7 ) %", "78 4/7 %", "550/7"],
        ["-3", "−3", "(-3)", "- 3", "-3.0", "$-3$", r"\boxed{-3}", r"-\frac{6}{2}", "6/-2", "x = -3"],
        [
            "24,960",
            "24960",
            r"24{,}960",
            "24,960.00",
            "$24,960",
            r"\$24,960",
            "2.496 × 10^4",
            r"2496 \times 10^{1}",
        ],
        ["10 °", "10", r"10^\circ", r"10^{\circ}", "10 degrees", "10°"],
        ["11.5 sec", "11.5 seconds", "11.5", "23/2 s"],
        ["217.5 cm 2", "217.5 cm^2", r"217.5\text{ cm}^2", "217.5"],
        ["rs . 3600", "Rs. 3,600", "3600 rupees", "3600"],
        ["200 sq feet", "200 square feet", "200"],
        ["e ) 30", "30", "30.", "e) 30"],
        ["3 : 2", "3:2", "1.5", "6 : 4"],
        ["50 liters", "50 litres", "50"],
        [r"\frac{\sqrt{3}}{2}", r"\dfrac{\sqrt{3}}{2}", r"$\boxed{\frac{\sqrt{3}}{2}}$"],
        ["none", "None.", "none"],
    ],
)
def test_math_accepts_every_spelling_of_the_same_number(spellings: list[str]) -> None:
    for prediction in spellings:
        for gold in spellings:
            assert math_match(prediction, ["other", gold]) == 1, (prediction, gold)


@pytest.mark.parametrize(
    ("left", "right"),
    [("5", "-5"), ("3.14", "314"), ("33.33", "33 1/3"), ("1/2", "12"), ("1/2", "2"), ("5 cm", "5 m"),
     ("5", "5x"), ("5", "5 or 6"), ("5", "5 and 3"), ("12", "(1,2)"), ("4", "4 hours 3 minutes"),
     ("10", "10^5"), ("105", "10^5"), ("3", "3:2:1"), ("0.5 %", "50 %"), (r"\frac{1}{23}", r"\frac{12}{3}"),
     ("1/0", "2/0"), ("5", "5 million"), ("3", "3 dozen"), ("1", "one"),
     ("5", "9" * 5_000), (r"\boxed{5} or \boxed{6}", "5"), ("5", ""), ("0", "")],
)  # fmt: skip
def test_math_rejects_different_answers(left: str, right: str) -> None:
    assert math_match(left, [right]) == math_match(right, [left]) == 0


def test_fifty_percent_equals_both_fifty_and_one_half() -> None:
    assert math_match("50", ["50%"]) == math_match("0.5", ["50%"]) == math_match("50%", ["1/2"]) == 1
    assert math_match("5", ["50%"]) == 0


def test_roots_are_equal_to_nine_digits_and_not_to_two() -> None:
    assert math_match(r"\sqrt{8}", [r"2\sqrt{2}"]) == 1
    assert math_match("1.4142135624", [r"\sqrt{2}"]) == 1
    assert math_match("1.41", [r"\sqrt{2}"]) == math_match("1.4", [r"\sqrt{2}"]) == 0


@pytest.mark.parametrize(
    ("answer", "value", "unit"),
    [
        ("3 dozen", 36, ""),
        ("2 hundred", 200, ""),
        ("5 thousand dollars", 5000, "dollar"),
        ("1.5 million", 1_500_000, ""),
        ("2 billions", 2 * 10**9, ""),
        ("-4", -4, ""),
        ("minus 4", -4, ""),
        ("+4", 4, ""),
        ("$ -3", -3, "dollar"),
        ("US$ 7", 7, "dollar"),
        ("Rs. 1200/-", 1200, "rupee"),
        ("€5", 5, "euro"),
        ("12 cm^2", 12, "square centimeter"),
        ("12 m 3", 12, "cubic meter"),
        ("60 kmph", 60, "kilometer / hour"),
        ("60 km/h", 60, "kilometer / hour"),
        ("60 kilometers per hour", 60, "kilometer / hour"),
        ("5 hrs", 5, "hour"),
        ("5 a b c d e", None, None),
        ("5 apples and pears", None, None),
        ("5 big red apples a day", 5, "big red apple a day"),
        ("5 big red apples a day now", None, None),
        ("5 cups a day", 5, "cup a day"),
        ("5 x", None, None),
        ("5M", None, None),
        ("5 K", None, None),
        ("(7)", 7, ""),
        ("(7) (8)", 56, ""),
        ("x = 68/2 = 34", 34, ""),
        ("so, the answer is: option (c) about 8", 8, ""),
        ("f(2) = 8", 8, ""),
        ("a = b = c = d = 8", None, None),
        ("not 8", None, None),
        ("8 is not the answer", None, None),
        ("there are 5 of 8 = 3", None, None),
        ("answer: 3\nanswer: 4", 4, ""),
        ("x" * 3_000 + " answer: 4", 4, ""),
    ],
)
def test_a_number_is_read_with_its_scale_sign_and_unit(answer, value, unit):
    found = parse_number(answer)
    assert (found and found.value, found and found.unit) == (value, unit)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("50 %", "50", True),
        ("50 %", "0.5", True),
        ("0.5", "50 %", True),
        ("50 %", "5", False),
        ("50 %", "50 cm", False),
        ("50 cents", "$0.5", True),
        ("$0.5", "50 cents", True),
        ("50 cents", "$50", False),
        ("3 m", "3 meters", True),
        ("3 m", "3", True),
        ("3 m", "3 cm", False),
        ("pi", "3.14159265358979", True),
        ("pi", "3.1415926", False),
        ("pi", "3.14159266", False),
    ],
)
def test_units_are_compared_where_both_answers_have_one(left, right, same):
    assert same_number(left, right) == same_number(right, left) == same
