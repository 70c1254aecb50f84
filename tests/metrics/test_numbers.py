"""`math` accepts every spelling of a number and no different answer."""

import pytest

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
