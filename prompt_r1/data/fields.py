"""Fields of a row → texts and golds, or BadRow with the reason; names and kinds of datasets."""

import hashlib
import math
import re
from collections.abc import Mapping

from prompt_r1.types import Kind

# What the published files call their datasets, and the paper's name. The rows for training and validation all
# say hotpot_qa, whatever they come from.
PAPER_NAMES = {
    "2WikiMultihopQA": "2WikiMultihopQA", "hotpot": "HotpotQA", "gsm8k": "GSM8K", "dapo-math": "DAPO-Math",
    "MusiQue": "MuSiQue", "PopQA": "PopQA", "w-book": "BookSum", "wp": "WritingPrompts", "MathQA": "MathQA",
    "squad_v2": "SQuAD v2", "triviaqa_train": "TriviaQA", "xum": "XSum",
    "hotpotqa/hotpot_qa": "mixed",
}  # fmt: skip
MATH_NAMES = ("gsm8k", "dapo", "mathqa")
TEXT_NAMES = ("booksum", "writingprompts", "xsum")

DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'


class BadRow(Exception):
    """Why a row cannot be used; who reads the file adds which."""


def text_of(row: Mapping[str, object], field: str) -> str:
    """A text that is not blank."""
    if field not in row:
        raise BadRow(f"the field {field} is missing")
    value = row[field]
    if not isinstance(value, str):
        raise BadRow(f"the field {field} must be a text, not {name_of(value)}")
    return checked(value, field)


def golds_of(value: object, field: str) -> tuple[str, ...]:
    """One gold answer or a list of them, none blank."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise BadRow(f"the field {field} holds no gold answer")
    return tuple(gold_of(gold, field) for gold in values)


def gold_of(value: object, field: str) -> str:
    """A text, or a number as a text."""
    if isinstance(value, str):
        return checked(value, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"the field {field} must hold texts or numbers, not {name_of(value)}")
    return str(value)


def checked(text: str, field: str) -> str:
    """The text, if there is something in it and all of it can be written as UTF-8."""
    if not text.strip():
        raise BadRow(f"the field {field} holds an empty text")
    if re.search("[\ud800-\udfff]", text):
        raise BadRow(f"the field {field} holds half a character (a lone surrogate)")
    return text


def name_of(value: object) -> str:
    """A value as messages show it."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def digest(text: str) -> str:
    """The id of a question that brings none."""
    return hashlib.sha1(text.encode()).hexdigest()


def paper_name(data_source: str) -> str:
    """hotpot-256-test → HotpotQA. Names that are not among the published ones stay as they are."""
    return PAPER_NAMES.get(re.sub(r"(-\d+)+-\w+$", "", data_source), data_source)


def kind_of(dataset: str) -> Kind:
    """What is asked for, by the dataset's name: a short answer, a number, or a text."""
    letters = re.sub("[^a-z0-9]", "", dataset.lower())
    if any(name in letters for name in MATH_NAMES):
        return "math"
    return "text" if any(name in letters for name in TEXT_NAMES) else "qa"


def bare_problem(text: str) -> str:
    """The problem without the sentences that DAPO wraps around it: they ask for another format of answers."""
    return text.removeprefix(DAPO_OPENING).removesuffix(DAPO_CLOSING)


def question_key(text: str) -> str:
    """Equal for questions that differ in case, blanks or DAPO's wrapper only."""
    return " ".join(bare_problem(text).casefold().split())
