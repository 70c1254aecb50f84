"""Normalise texts before they are compared: lower case, no articles, and only marks that carry a value.

SQuAD's rules, which the paper's release uses (evaluation/official.py), drop all punctuation. They were made
for names. In mathematics they make wrong answers right: "-5" equals "5", "1/2" equals "12", and "2x+3" equals
"2x-3". The rules here (`STEPS`) keep the point of a number, and the operators - + / = ^ < > ≤ ≥ ≠ without the
blanks around them. After a word, the blank before a minus or a comparison stays, and a dash between blanks is
dropped:

    x = - 5               x=-5
    2x + 3                2x+3
    speed < 5             speed <5
    it is -5              it is -5
    60 km / h             60 km/h
    18-20                 18 20
    COVID-19              covid19
    World War II - 1939   world war ii 1939
    C++ language          c++ language
    1,234                 1234
    red,blue              red blue
    $5                    5

All other marks are dropped, also brackets, "!", "|" and "%": "[0,1]" equals "(0,1)", and "5!" equals "5". In
doubt a mark is kept: the hyphen of "F-16" could be the minus of "x-16", so "F-16" is not "F16".
"""

import re
import string
import unicodedata
from functools import lru_cache


# All metrics of a game normalise the same answers, and the games of a question have the same gold answers.
@lru_cache(maxsize=10_000)
def normalise(text: str) -> str:
    """The text as it is compared: texts with the same normal form are equal."""
    text = plain_characters(text).casefold()
    for typed, plain in SPELLINGS.items():
        text = text.replace(typed, plain)
    text = " ".join(text.split())
    for pattern, replacement in STEPS:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


SPELLINGS = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "$": ""}
LETTER = r"[^\W\d_]"
WORD = (
    rf"(?<!\\)(?<!{LETTER})"  # from its first letter on, but no command of LaTeX (\theta)
    rf"(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp)(?!{LETTER}))"  # no name of mathematics
    rf"{LETTER}{{2,}}"  # several letters
)
# The point of 3.14 and of .5.
POINT = r"(?:(?<=\d)|(?<![\w.]))\.(?=\d)"
# A mark of punctuation that may be dropped: no operator, no point of a number, and not the # of C#.
MARK = rf"(?:(?![-+/=^<>]|{POINT}|(?<=\w)#)[{re.escape(string.punctuation)}])"
OPENING = r"[ ({\[]*"  # the blanks and opening brackets after an operator

# Each pattern is replaced everywhere, in this order. The text is in lower case and has single blanks.
STEPS = (
    # Marks at or in a word: it's → its, 9 a.m. - 5 p.m. → 9 am - 5 pm
    (rf"(?<={LETTER})[.!?\"]+|(?<={LETTER})'(?={LETTER})", ""),
    # Thousands: 1,234 → 1234 and, as written in India, 1,00,000 → 100000, but not 1,23.
    (r"(?<=\d),(?=(?:\d\d,){0,4}\d{3}(?!\d))", ""),
    # Powers: x**2 → x^2, but not **bold** text.
    (r"(?<=[\w)}\]|])( ?)\*\*\1(?=[-+\w.({\\|])", "^"),
    # The plus of a sum: 2xy + 3 → 2xy+3, disney + pixar → disney+pixar
    (r"(?<=[\w)}\]|]) \+ (?=[\w({\\|])", "+"),
    # Fractions, equations and exponents: 1 / 3 → 1/3, f = ma → f=ma, 10 ^ {5} → 10^5
    (rf" ?([/=^]){OPENING}", r"\1"),
    # The plus of a positive number, at the start, after a word, and in an exponent:
    # +5 → 5, it is +5 → it is 5, 1e+5 → 1e5, but not x+5.
    (rf"(^|\de|{WORD} )\+(?=\.?\d)", r"\1"),
    # Hyphens: well-known → wellknown, covid-19 → covid19, but not x-1.
    (rf"({WORD})-+(?=\w)|(?<=\w)-+(?={WORD})", r"\1"),
    # Dashes: world war ii - 1939 → world war ii 1939, but not x - 1.
    (rf"({WORD}) -+ |(?<!\S)-+ (?={WORD})", r"\1 "),
    # Ranges: 18-20 → 18 20, 50% - 60% → 50 60%, but not x^2-1.
    (r"(?<![\w.^])(\.?\d[\d.]*)%? ?-+ ?(?=\.?\d)", r"\1 "),
    # Signs and comparisons: x - 1 → x-1, t > 0 → t>0. After a word they begin the next: it is < 5 → it is <5.
    # A sign at the end of a name stays there: disney+ and hulu.
    (rf"({WORD} )? ?(?<!\+)([-+<>≤≥≠])(?!\+)(?!(?<={LETTER}[-+]) {WORD}){OPENING}", r"\1\2"),
    # Marks that separate: red,blue → red blue, 3:2 → 3 2, f(-1) → f -1
    (rf",|[*:;({{\[](?=[-+])|(?<=\d){MARK}+(?=\.?\d)", " "),
    # All other marks: u.s. → us
    (MARK, ""),
    # Articles: a film → film. But the variable of 5+a and of a=5 stays.
    (r"\b(an|the|(?<![-+/=^<>≤≥≠])a(?![-+/=^<>≤≥≠#]))\b", " "),
)


# NFKC, Unicode's compatibility form, lacks these plain forms: minus, two slashes, times, two apostrophes.
PLAIN = {"\u2212": "-", "\u2044": "/", "\u2215": "/", "\u00d7": "x", "\u02bb": "'", "\u02bc": "'"}
# NFKC alone would turn 10³ into 103, 2ⁿ into 2n and 3½ into 31/2.
SUPERSCRIPT = re.compile("([²³¹⁰-ⁿ]+)")
FRACTION_AFTER_DIGIT = re.compile(r"(?<=\d)([¼-¾⅐-⅞])")


def plain_characters(text: str) -> str:
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
        return "'"  # Any ASCII mark that is dropped later would do.
    return character
