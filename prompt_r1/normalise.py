"""Normalise texts before they are compared: lower case, no articles, and only marks that carry a value.

SQuAD's rules, which the paper's release uses (evaluation/official.py), drop all punctuation. They were made
for names. In mathematics they make wrong answers right: "-5" equals "5", "1/2" equals "12", and "2x+3" equals
"2x-3". The rules here keep the point of a number, and the operators - + / = ^ < > ≤ ≥ ≠ without the
blanks around them. After a word, the blank before a minus or a comparison stays. A - beside a word that has
blanks on both sides is a dash, and is dropped:

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

Commas, colons and semicolons become blanks. All other marks are dropped, also brackets, "!", "|" and "%":
"[0,1]" equals "(0,1)", and "5!" equals "5". In doubt a mark is kept: the hyphen of "F-16" could be the minus
of "x-16", so "F-16" is not "F16".

If nothing is left of a text, as of the answers "a" and "$", the text itself stays, without marks around it.
"""

import re
import string
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

ARTICLES = ("a", "an", "the")
AROUND = string.whitespace + ".,:;!?()[]{}*_\"'`"  # marks around an answer, but no signs and operators


# All metrics of a game normalise the same answers, and the games of a question have the same gold answers.
@lru_cache(maxsize=10_000)
def normalise(text: str) -> str:
    """The text as it is compared: texts with the same normal form are equal."""
    plain = plain_characters(text).casefold()
    text = plain
    for substitution in SUBSTITUTIONS:
        text = substitution.apply(text)
    # Articles go, but the "a" of "5+a" stays, because the word is "5+a".
    words = " ".join(word for word in text.split() if word not in ARTICLES)
    return words or plain.strip(AROUND) or plain.strip()


@dataclass(frozen=True)
class Substitution:
    """A step of the normalisation: everywhere in a text, what matches `pattern` becomes `replacement`.

    `changes` has an example before and after the step, and `keeps` a text that the step does not change. A
    test applies each step to its examples.
    """

    changes: tuple[str, str]
    pattern: str
    replacement: str = ""
    keeps: str = ""

    def apply(self, text: str) -> str:
        """The text after the step."""
        return re.sub(self.pattern, self.replacement, text)


# Parts of the patterns. The text is in lower case.
LETTER = r"[^\W\d_]"
FUNCTION = "(?:pi|sqrt|sin|cos|tan|log|ln|exp)"  # names of mathematics
# A letter or a name of mathematics: x, sin and \theta, but not "is" and "sine".
SYMBOL = rf"(?:\\{LETTER}+|(?<!{LETTER})(?:{LETTER}|{FUNCTION}))"
# A place where no whole FUNCTION begins: before "sine", but not before "sin".
NOT_BEFORE_FUNCTION = f"(?!{FUNCTION}(?!{LETTER}))"
# Several letters that are no symbol: "is" and "sine", but not x, sin and \theta.
WORD = rf"(?<!\\)(?<!{LETTER}){NOT_BEFORE_FUNCTION}{LETTER}{{2,}}"
NUMBER = r"\.?\d[\d.]*"  # 5, 3.14, .5
BEFORE_NUMBER = r"(?=\.?\d)"  # the place before a number
AFTER_OPERAND = r"(?<=[\w)}\]|])"  # the place after an operand, such as x, 2x, (x+1) or |x|
BEFORE_OPERAND = r"(?=[-+\w({\\|]|\.\d)"  # the place before an operand, which may begin with a sign
SIGN = "[-+<>≤≥≠]"  # signs and comparisons
OPENING = r"[ ({\[]"  # a blank or an opening bracket
AFTER_NAME_AND_SIGN = rf"(?<={LETTER}[-+])(?= {WORD})"  # the place after the + of disney+ and hulu
AFTER_TWO_PLUSES = r"(?<=\+\+)(?= )"  # the place after the ++ of c++ language
# The place after a sign that belongs to a name.
AFTER_A_NAME = f"{AFTER_NAME_AND_SIGN}|{AFTER_TWO_PLUSES}"
# A mark that carries no value. Two marks do carry one: a point before a digit (3.14), except after another
# point (..5), and a # after a word (c#).
MARK = r"(?:[!\"%&'()*?@[\\\]_`{|}~]|\.(?!\d)|(?<=\.)\.|(?<!\w)#)"

SUBSTITUTIONS = (
    # Write comparisons, powers, abbreviations and numbers in one way.
    Substitution(("x <= 5", "x ≤ 5"), "<=", "≤"),
    Substitution(("x >= 5", "x ≥ 5"), ">=", "≥"),
    Substitution(("x != 5", "x ≠ 5"), "!=", "≠"),
    Substitution(("x == 5", "x = 5"), "==", "="),
    Substitution(("$5", "5"), r"\$"),
    Substitution(("red \n blue", "red blue"), r"\s+", " "),
    Substitution((" red ", "red"), "^ | $"),
    Substitution(("u.s. yes!", "us yes"), rf"(?<={LETTER})[.!?\"]+"),
    # The prime of x' stays.
    Substitution(("it's", "its"), rf"(?<={LETTER}{LETTER})'+", keeps="x'-1"),
    Substitution(("x ** 2", "x^2"), rf"{AFTER_OPERAND}( ?)\*\*\1{BEFORE_OPERAND}", "^", keeps="**paris**."),
    # Commas between thousands, also as written in India.
    Substitution(("1,234 1,00,000", "1234 100000"), r"(?<=\d),(?=(?:\d\d,){0,4}\d{3}(?!\d))", keeps="1,23"),
    # Drop the blanks around operators that join two operands, and the opening brackets after / = ^. Otherwise
    # a later rule would turn the bracket of 2^(-1) into a blank. The closing brackets are dropped last.
    Substitution(("x = 1 / (3)", "x=1/3)"), rf" ?([/=^]){OPENING}*", r"\1"),
    Substitution(("2xy + 3", "2xy+3"), rf"{AFTER_OPERAND} \+ {BEFORE_OPERAND}", "+"),
    # Drop the plus of a positive number.
    Substitution(("+5", "5"), rf"^\+{BEFORE_NUMBER}", keeps="x+5"),
    Substitution(("1e+5", "1e5"), rf"(?<=\de)\+{BEFORE_NUMBER}"),
    Substitution(("it is +5", "it is 5"), rf"({WORD} )\+{BEFORE_NUMBER}", r"\1", keeps="x +5"),
    # Drop hyphens (covid-19), dashes and the marks of ranges. The marks - that remain are minus signs.
    Substitution(("covid-19", "covid19"), rf"({WORD})-+(?=\w)", r"\1", keeps="x-1"),
    Substitution(("x-ray", "xray"), rf"(?<=\w)-+(?={WORD})", keeps="x-sin y"),
    Substitution(("world war ii - 1939", "world war ii 1939"), rf"({WORD} )-+ ", r"\1", keeps="x - 1"),
    Substitution(("1939 - world war ii", "1939 world war ii"), rf"(?<!\S)-+ (?={WORD})", keeps="1939 - x"),
    Substitution(("18-20", "18 20"), rf"(?<![\w.^])({NUMBER})%? ?-+ ?{BEFORE_NUMBER}", r"\1 ", keeps="x^2-1"),
    # Drop the blanks around signs and comparisons, and the opening brackets after them. A sign that belongs
    # to a name, as in disney+ or c++, keeps the blank after it.
    Substitution(("5 - x", "5- x"), rf"(?<!{LETTER})(?<!\+) (?={SIGN})", keeps="c++ < d"),
    Substitution(("x - 1", "x- 1"), rf"({SYMBOL}) (?={SIGN})", r"\1", keeps="it is < 5"),
    Substitution(
        ("x- (1)", "x-1)"), rf"(?<={SIGN})(?!{AFTER_A_NAME}){OPENING}+", keeps="disney+ and c++ language"
    ),
    # Marks that separate become blanks.
    Substitution(("red,blue", "red blue"), "[,:;]", " "),
    Substitution(("f(-1)", "f -1)"), r"[*({\[](?=[-+])", " "),
    Substitution(("5*300", "5 300"), rf"(?<=\d){MARK}+{BEFORE_NUMBER}", " "),
    # All other marks without a value vanish.
    Substitution(("(b) 5%", "b 5"), MARK, keeps="c# 3.14"),
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
        return "'"  # It is not "", because a mark between digits becomes a blank, as in 5·3.
    return character
