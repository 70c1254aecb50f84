"""Normalise texts before they are compared: lower case, no articles, and only marks that carry a value.

SQuAD's rules, which the paper's release uses (evaluation/official.py), drop all punctuation. They were made
for names. In mathematics they make wrong answers right: "-5" equals "5", "1/2" equals "12", and "2x+3" equals
"2x-3". The rules here keep the point of a number, and the operators - + / = ^ < > ≤ ≥ ≠ without the
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

Commas, colons and semicolons become blanks. All other marks are dropped, also brackets, "!", "|" and "%":
"[0,1]" equals "(0,1)", and "5!" equals "5". In doubt a mark is kept: the hyphen of "F-16" could be the minus
of "x-16", so "F-16" is not "F16".

If nothing is left of a text, as of the answers "a" and "$", the text itself stays, without marks around it.
"""

import re
import string
import unicodedata
from functools import lru_cache

ARTICLES = ("a", "an", "the")
AROUND = string.whitespace + ".,:;!?()[]{}*_\"'`"  # marks around an answer, but no signs and operators


# All metrics of a game normalise the same answers, and the games of a question have the same gold answers.
@lru_cache(maxsize=10_000)
def normalise(text: str) -> str:
    """The text as it is compared: texts with the same normal form are equal."""
    plain = plain_characters(text).casefold()
    text = _spell_alike(plain)
    text = _join_operands(text)
    text = _drop_hyphens(text)
    text = _join_signs(text)
    text = _drop_marks(text)
    # Articles go, but the "a" of "5+a" stays, because the word is "5+a".
    words = " ".join(word for word in text.split() if word not in ARTICLES)
    return words or plain.strip(AROUND) or plain.strip()


# Parts of the patterns. The text is in lower case.
LETTER = r"[^\W\d_]"
FUNCTION = "(?:pi|sqrt|sin|cos|tan|log|ln|exp)"  # names of mathematics
SYMBOL = rf"(?:\\{LETTER}+|(?<!{LETTER})(?:{LETTER}|{FUNCTION}))"  # \theta, x, or a name of mathematics
WORD = rf"(?<!\\)(?<!{LETTER})(?!{FUNCTION}(?!{LETTER})){LETTER}{{2,}}"  # several letters that are no symbol
NUMBER = r"\.?\d[\d.]*"  # 5, 3.14, .5
BEFORE_NUMBER = r"(?=\.?\d)"  # the place before a number
AFTER_OPERAND = r"(?<=[\w)}\]|])"  # the place after an operand, such as x, 2x, (x+1) or |x|
BEFORE_OPERAND = r"(?=[-+.\w({\\|])"  # the place before an operand, which may begin with a sign
SIGN = "[-+<>≤≥≠]"  # signs and comparisons
OPENING = r"[ ({\[]"  # a blank or an opening bracket

SPELLINGS = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "$": ""}


def _spell_alike(text: str) -> str:
    """Write operators, abbreviations and numbers in one way: x <= 5 → x ≤ 5, u.s. → us, 1,234 → 1234."""
    for typed, plain in SPELLINGS.items():
        text = text.replace(typed, plain)
    # Bold text: **Paris**. → Paris.
    text = re.sub(r"(?<![\w)}\]|])\*\*(\S[^*]*)\*\*", r"\1", text)
    text = " ".join(text.split())
    # Marks after a letter: u.s. → us, yes! → yes
    text = re.sub(rf"(?<={LETTER})[.!?\"]+", "", text)
    # Apostrophes after two letters: it's → its, the dogs' → the dogs, but not the prime of x'-1.
    text = re.sub(rf"(?<={LETTER}{LETTER})'+", "", text)
    # Powers: x**2 → x^2
    text = re.sub(rf"{AFTER_OPERAND}( ?)\*\*\1{BEFORE_OPERAND}", "^", text)
    # Thousands: 1,234 → 1234 and, as written in India, 1,00,000 → 100000, but not 1,23.
    return re.sub(r"(?<=\d),(?=(?:\d\d,){0,4}\d{3}(?!\d))", "", text)


def _join_operands(text: str) -> str:
    """Drop the blanks around operators that join two operands: 1 / 3 → 1/3, x = 5 → x=5, 2xy + 3 → 2xy+3."""
    text = re.sub(rf" ?([/=^]){OPENING}*", r"\1", text)
    text = re.sub(rf"{AFTER_OPERAND} \+ {BEFORE_OPERAND}", "+", text)
    # The plus of a positive number: +5 → 5, 1e+5 → 1e5, it is +5 → it is 5, but not x+5.
    text = re.sub(rf"^\+{BEFORE_NUMBER}", "", text)
    text = re.sub(rf"(?<=\de)\+{BEFORE_NUMBER}", "", text)
    return re.sub(rf"({WORD} )\+{BEFORE_NUMBER}", r"\1", text)


def _drop_hyphens(text: str) -> str:
    """Drop hyphens and dashes. The marks - that remain are minus signs."""
    if "-" not in text:
        return text
    # Hyphens after a word: covid-19 → covid19
    text = re.sub(rf"({WORD})-+(?=\w)", r"\1", text)
    # Hyphens before a word: x-ray → xray, but not x-1.
    text = re.sub(rf"(?<=\w)-+(?={WORD})", "", text)
    # Dashes after a word: world war ii - 1939 → world war ii 1939
    text = re.sub(rf"({WORD} )-+ ", r"\1", text)
    # Dashes before a word: 1939 - world war ii → 1939 world war ii, but not x - 1.
    text = re.sub(rf"(?<!\S)-+ (?={WORD})", "", text)
    # Ranges: 18-20 → 18 20, 50% - 60% → 50 60%, but not x^2-1.
    return re.sub(rf"(?<![\w.^])({NUMBER})%? ?-+ ?{BEFORE_NUMBER}", r"\1 ", text)


def _join_signs(text: str) -> str:
    """Drop the blanks around signs and comparisons, and the brackets after them: x - 1 → x-1, t > 0 → t>0."""
    # Before a sign, the blank after a digit or a mark goes, but not the blank after a plus: c++ < d.
    text = re.sub(rf"(?<!{LETTER})(?<!\+) (?={SIGN})", "", text)
    # The blank after a symbol goes, too, but not the blank after a word: it is < 5.
    text = re.sub(rf"({SYMBOL}) (?={SIGN})", r"\1", text)
    # After a sign, blanks and brackets go, unless the sign ends a name: disney+ and hulu, c++ language.
    after_a_name = rf"(?<={LETTER}[-+])(?= {WORD})|(?<=\+\+)(?= )"
    return re.sub(rf"(?<={SIGN})(?!{after_a_name}){OPENING}+", "", text)


def _drop_marks(text: str) -> str:
    """Drop all marks but operators, the points of numbers, and the # of C#."""
    mark = (
        r"(?:[!\"%&'()*?@[\\\]_`{|}~]"
        r"|\.(?!\d)"  # a point, unless a digit follows, as in 3.14 or .5
        r"|(?<=\.)\."  # a point that follows another, also before a digit: ..5
        r"|(?<!\w)#)"  # a #, unless it follows a word, as in C#
    )
    # Marks that become blanks: red,blue → red blue, f(-1) → f -1, 5·300 → 5 300
    text = re.sub(r"[,:;]", " ", text)
    text = re.sub(r"[*({\[](?=[-+])", " ", text)
    text = re.sub(rf"(?<=\d){mark}+{BEFORE_NUMBER}", " ", text)
    # Marks that vanish: (b) → b
    return re.sub(mark, "", text)


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
