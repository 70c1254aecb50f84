"""What a sentence answers: a rule that is the same for every method, and that sees no gold answer.

Exact match gives 0 to "The capital of Japan is Tokyo.", which is how an environment that is asked once often
replies, while a trained agent has learned to write "Tokyo". So results show two rates side by side: EM of the
answer as it stands, and EM of the answer or of what this rule reads in it, whichever is higher. It reads:

1. the content of the last `\\boxed{}`, or what follows the last "answer is" or "answer:";
2. of a mathematical question the last number (in a box: the only one), and of a sentence that begins with
   yes or no this word;
3. else the first sentence with a form of "to be" (or the first of all): the side of the verb that repeats
   fewer words of the question, without words of the question and function words at its ends.
"""

import re

from prompt_r1.f1 import plain_characters
from prompt_r1.types import Kind

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
MARK = re.compile(r"\banswer(?: is|:)\s*:?\s*", re.IGNORECASE)
# 1,000.5 or .5, 1e5, 10^5, 3/4, 2 1/2. No exponent, index or part of a word: cm^2, x_1, \frac{1}{2}, H2O.
FRACTION = r"(?:\d+ )?\d+ ?/ ?-?\d+"
DECIMAL = r"(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+|\^\{?-?\d+\}?)?"
NUMBER = re.compile(rf"(?<![\w^{{.])-?\$?(?:{FRACTION}|{DECIMAL})")
VERDICT = re.compile(r"(yes|no)\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=\w\w[.!?])\s+")  # not after an initial: "J. R. R. Tolkien"
# "was written by" is one verb; "is not" says what an answer is not.
TO_BE = re.compile(r"\b(?:is|are|was|were|be)\b(?!\s+not\b)(?:\s+\w+\s+by\b)?", re.IGNORECASE)
FUNCTION_WORDS = frozenset(
    "a an the it he she they this that in on at by of to from as i think believe would called named".split()
)


def extract_answer(answer: str, question: str, kind: Kind) -> str:
    """The short answer that a longer one contains; the whole one if no rule applies."""
    boxed = BOXED.findall(answer)
    text = str(boxed[-1]) if boxed else MARK.split(answer)[-1]
    numbers = NUMBER.findall(plain_characters(text)) if kind == "math" else []
    if len(numbers) == 1 or (numbers and not boxed):
        return str(numbers[-1])
    if verdict := VERDICT.match(text):
        return verdict[1]
    sentences = SENTENCE_END.split(text.strip())
    sentence = next(filter(TO_BE.search, sentences), sentences[0])
    asked = frozenset(_words(question)) | FUNCTION_WORDS
    sides = TO_BE.split(sentence, maxsplit=1)
    side = min(sides, key=lambda side: (_share(side, asked), len(side)))
    return _without_ends(side, asked) or _without_ends(side, frozenset())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _share(text: str, known: frozenset[str]) -> float:
    """The share of known words in a text; 1 in an empty one."""
    words = _words(text)
    return sum(word in known for word in words) / len(words) if words else 1.0


def _without_ends(text: str, known: frozenset[str]) -> str:
    """A text without known words at its ends."""
    words = text.split()
    others = [place for place, word in enumerate(words) if not known.issuperset(_words(word))]
    inner = words[others[0] : others[-1] + 1] if others else []
    return " ".join(inner).strip(" .,:;!?\"'*")
