"""Check the fields of a row and convert them to text and gold answers; names and kinds of datasets."""

import hashlib
import math
import re
from collections.abc import Mapping

from prompt_r1.types import Kind

Fields = Mapping[str, object]

# Names of the datasets in the published files, and in the paper. In the published training and validation
# files all rows say hotpot_qa, whichever dataset they come from; `unnamed.py` infers it.
PAPER_NAMES = {
    "2WikiMultihopQA": "2WikiMultihopQA",
    "hotpot": "HotpotQA",
    "gsm8k": "GSM8K",
    "dapo-math": "DAPO-Math",
    "MusiQue": "MuSiQue",
    "PopQA": "PopQA",
    "w-book": "BookSum",
    "wp": "WritingPrompts",
    "MathQA": "MathQA",
    "squad_v2": "SQuAD v2",
    "triviaqa_train": "TriviaQA",
    "xum": "XSum",
    "hotpotqa/hotpot_qa": "mixed",
}
MATH_DATASETS = ("gsm8k", "dapo", "mathqa")
TEXT_DATASETS = ("booksum", "writingprompts", "xsum")

DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'


class BadRow(Exception):
    """A row cannot be used, and why. The caller adds the file and the row number."""


def text_field(row: Fields, field: str) -> str:
    """The text of a field. Raises BadRow if it is missing, blank or not a text."""
    if field not in row:
        raise BadRow(f"the field {field} is missing")
    value = row[field]
    if not isinstance(value, str):
        raise BadRow(f"the field {field} must be a text, not {describe(value)}")
    return checked_text(value, field)


def gold_answers(value: object, field: str) -> tuple[str, ...]:
    """The gold answers in a field, which holds one or a list of them. Raises BadRow if one is blank."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise BadRow(f"the field {field} has no gold answer")
    return tuple(text_or_number(gold, field) for gold in values)


def text_or_number(value: object, field: str) -> str:
    """A text, or a finite number converted to text. Raises BadRow for anything else."""
    if isinstance(value, str):
        return checked_text(value, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"the field {field} must contain texts or numbers, not {describe(value)}")
    return str(value)


def checked_text(text: str, field: str) -> str:
    """Return the text. Raises BadRow if it is blank or cannot be encoded as UTF-8."""
    if not text.strip():
        raise BadRow(f"the field {field} contains an empty text")
    if re.search("[\ud800-\udfff]", text):
        raise BadRow(f"the field {field} contains half a character (a lone surrogate)")
    return text


def describe(value: object) -> str:
    """The type and the beginning of a value, for error messages."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def id_from_text(text: str) -> str:
    """The id of a question that has none: the SHA-1 of its text."""
    return hashlib.sha1(text.encode()).hexdigest()


def paper_name(data_source: str) -> str:
    """The paper's name of a dataset in a published file: hotpot-256-test → HotpotQA.

    Other names are returned unchanged.
    """
    return PAPER_NAMES.get(re.sub(r"(-\d+)+-\w+$", "", data_source), data_source)


def kind_of(dataset: str) -> Kind:
    """The kind of question in a dataset, by its name: math (a number), text (a long one) or qa (short)."""
    letters = re.sub("[^a-z0-9]", "", dataset.lower())
    if any(name in letters for name in MATH_DATASETS):
        return "math"
    return "text" if any(name in letters for name in TEXT_DATASETS) else "qa"


def without_dapo_wrapper(text: str) -> str:
    """The problem without the sentences that DAPO puts around it, which ask for another answer format."""
    return text.removeprefix(DAPO_OPENING).removesuffix(DAPO_CLOSING)


def question_key(text: str) -> str:
    """A key that is equal for questions that differ only in case, white space or DAPO's wrapper."""
    return " ".join(without_dapo_wrapper(text).casefold().split())
