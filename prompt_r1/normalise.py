"""Normalise texts before they are compared, by one of two sets of rules.

    official   SQuAD's: lower case, no punctuation, no articles. They are here for comparison with the paper's
               tables, in the form of the paper's released code.
    strict     the default, which the reward uses. Punctuation that carries a value is kept.

SQuAD's rules were made for names. In mathematics they make wrong answers right: "-5" equals "5", "1/2" equals
"12", and "2x+3" equals "2x-3". The strict rules divide a text into numbers, words and marks of punctuation.
They keep a mark where it carries a value, which the tokens beside it decide (`_role_of`):

    x = - 5             x=-5              a sign, and an equals sign between its neighbours
    2x + 3              2x+3
    x - 1               x-1               a minus, beside a variable or a number
    18-20               18 20             a range of numbers
    F-16                f16               a name
    World War I - 1914  world war i 1914  a dash
    the speed < 5       speed <5
    km / h              km/h
    Disney + Pixar      disney+pixar
    C++                 c++
    1,234               1234              thousands
    red,blue            red blue
    $5                  5

All other marks are dropped, also brackets, "!", "|" and "%": "[0,1]" equals "(0,1)", and "5!" equals "5".
"""

import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ARTICLES = re.compile(r"\b(a|an|the)\b")
DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


# All metrics of a game normalise the same answers, and the games of a question have the same gold answers.
@lru_cache(maxsize=10_000)
def normalise(text: str, *, official: bool = False) -> str:
    """Lower the case, drop punctuation and articles, and collapse white space (SQuAD).

    The strict rules keep the punctuation that carries a value, and make typographic characters plain.
    """
    words = _official(text) if official else _strict(text)
    return " ".join(words.split())


def _official(text: str) -> str:
    """The text in lower case, without articles and punctuation."""
    return ARTICLES.sub(" ", text.lower().translate(DROP_PUNCTUATION))


# The strict rules

LETTER = r"[^\W\d_]"
TOKEN = re.compile(
    rf"""
      (?P<number> ((?<![\w.])\.)? \d+ (\.\d+)* ([eE][+-]?\d+)? )  # 5, 3.14, .5, 1e-5
    | (?P<word> \\[a-zA-Z]+ | {LETTER}+ ('{LETTER}+)* )           # Paris, it's, \pi
    | (?P<mark> -+ | \++ | \*\* | [≤≥≠{re.escape(string.punctuation)}] )
    | (?P<symbol> \S )                                            # €, √
    """,
    re.VERBOSE,
)
DROPPED_INSIDE = re.compile(r"['\\]|(?<=[eE])\+")  # These characters of a token: it's, \pi, 1e+5.
MATHEMATICS = {"pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "√", "∞"}
VARIABLE = re.compile("[a-zα-ω]")

SPELLINGS = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "$": ""}
# The commas of 1,234 and, as written in India, of 1,00,000, but not of 1,23.
THOUSANDS = re.compile(r"(?<=\d),(?=(?:\d\d,){0,4}\d{3}(?!\d))")
ARTICLE_AFTER_OPERATOR = re.compile(r"(?<=[-+/=]\s)\s*(?:an?|the)\s+(?=\w)")  # 5 = a prime
# The article of "a film" leaves. But "a" is a variable if an operator stands directly before it ("5+a"), or
# after it, with or without blanks ("a = 5"). A known error: in "a -5 degree slope" the article is kept.
STRICT_ARTICLES = re.compile(r"\b(an|the|(?<![-+/=^<>≤≥≠*])a(?!\s*[-+/=^<>≤≥≠*#]))\b")


@dataclass(frozen=True)
class Token:
    """A number, a word, a mark of punctuation, or another symbol."""

    kind: str | None  # the name of its group in TOKEN
    text: str
    after_blank: bool  # Whether it follows a blank, or begins the text.

    @property
    def is_word(self) -> bool:
        """Whether it is no mark of punctuation. The operators / = ^ + join such tokens."""
        return self.kind in ("number", "word", "symbol")

    @property
    def is_operand(self) -> bool:
        """Whether it is a number or means mathematics. A minus and the comparisons join such tokens."""
        if self.kind == "number" or self.text in MATHEMATICS or self.text.startswith("\\"):
            return True
        return VARIABLE.fullmatch(self.text) is not None

    @property
    def is_letter(self) -> bool:
        """Whether it is a single letter."""
        return self.kind == "word" and len(self.text) == 1


EDGE = Token("edge", " ", after_blank=True)  # It stands before the first token of a text, and after the last.


def _strict(text: str) -> str:
    """The text in lower case, without articles, and without the marks that carry no value."""
    text = plain_characters(text)
    for typed, plain in SPELLINGS.items():
        text = text.replace(typed, plain)
    text = THOUSANDS.sub("", text)
    text = ARTICLE_AFTER_OPERATOR.sub("", text)
    words = _words_of(_tokens_of(text))
    return STRICT_ARTICLES.sub(" ", " ".join(words).casefold())


def _words_of(tokens: Sequence[Token]) -> list[str]:
    """Join tokens to words, each mark by its role. A blank ends a word, unless the mark beside it joins."""
    words = [""]
    joins_next = False  # Whether the next token belongs to the last word, also after a blank.
    blank = mark = False  # Whether a blank or a dropped mark stands between the last word and the next token.
    for place in range(1, len(tokens) - 1):
        token = tokens[place]
        role = _role_of(tokens, place) if token.kind == "mark" else "stays"
        if token.after_blank or role == "separates":
            blank = True
        if role in ("dropped", "separates"):
            mark = True
            continue
        # Without their marks, F-16 is one word, but 18-20 two.
        follows_number = mark and token.kind == "number" and words[-1][-1:].isdecimal()
        begins_word = blank or follows_number or role == "begins"
        if begins_word and not joins_next and role != "joins":
            words.append("")
        words[-1] += DROPPED_INSIDE.sub("", token.text)
        joins_next = role in ("joins", "begins")
        blank = mark = False
    return words


def _tokens_of(text: str) -> list[Token]:
    """The tokens of a text, between two edges."""
    tokens = [EDGE]
    end = -1
    for match in TOKEN.finditer(text):
        tokens.append(Token(match.lastgroup, match[0], after_blank=match.start() != end))
        end = match.end()
    return [*tokens, EDGE]


def _role_of(tokens: Sequence[Token], place: int) -> str:
    """The role of the mark at a place.

    joins      It makes one word of its neighbours: F = ma equals F=ma.
    begins     It begins a word: - 5 equals -5.
    stays      It is kept as it stands: C++.
    separates  It ends a word: red,blue equals red blue.
    dropped    Without it, its neighbours are one word: F-16 equals F16.
    """
    before, mark, after = tokens[place - 1 : place + 2]
    touches_before = before.is_word and not mark.after_blank
    touches_after = after.is_word and not after.after_blank
    same_blanks = mark.after_blank == after.after_blank
    # A bracket stands for what is inside it.
    bracket_before = before.text in ")}]|"
    operand_before = before.is_operand or bracket_before
    unsigned = tokens[place + 2] if after.text == "-" else after  # of -5, the 5
    bracket_after = unsigned.text in "({|"
    operand_after = unsigned.is_operand or bracket_after
    between_words = (before.is_word or bracket_before) and (unsigned.is_word or bracket_after)
    match mark.text:
        case ",":
            return "separates"
        case "+" | "-" if before.text == "^":  # Na⁺, 10^-5
            return "stays"
        case "/" | "=":  # km / h, F = ma
            return "joins" if between_words else "dropped"
        case "^":  # x ^ 2, Na⁺
            return "joins" if between_words else "stays"
        case "**":  # x ** 2, but not **bold** text
            return "joins" if between_words and same_blanks else "dropped"
        case "++" | "#":  # C++, C#
            return "stays" if touches_before else "dropped"
        case "+":
            if between_words and (same_blanks or operand_before):
                return "joins"  # Disney + Pixar, 2x+ y
            if touches_before or after.after_blank:
                return "stays"  # Canal+ Group
            return "dropped"  # +5
        case "<" | ">" | "≤" | "≥" | "≠":
            if not operand_after:
                return "stays"
            if operand_before or before.is_letter:
                return "joins"  # x < 5, T > 0
            return "begins"  # speed < 5
        case "-":
            is_power = before is not EDGE and tokens[place - 2].text == "^"
            if before.kind == after.kind == "number" and not is_power:
                return "dropped"  # 18-20, but not x^2-1
            if (operand_before and operand_after) or (before.is_letter and after.is_letter):
                return "joins"  # x - 1, 3 - sqrt(2), A - B
            if (not touches_before or before.kind == "symbol") and not after.after_blank:
                return "begins"  # -5, €-5
            if operand_after and (before is EDGE or before.text in "=({[,:<>≤≥≠^/+-"):
                return "begins"  # - 5, x = - 5
            if touches_before and not touches_after:
                return "stays"  # the blood type O-
            return "dropped"  # F-16, World War I - 1914
    return "dropped"


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
