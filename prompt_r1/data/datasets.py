"""The paper's twelve datasets: their names, and how their rows are converted to questions.

Each function reads a row of one dataset, as its authors or the Hub publish it. It raises LeftOut for a row
that the dataset itself marks as unusable, and BadRow for a row that lacks a column of the dataset: then the
file is of another dataset.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prompt_r1.data.rows import BadRow, Fields, describe, fields_of, gold_answers, text_field, text_or_number
from prompt_r1.types import Kind

Draft = tuple[str, tuple[str, ...]]  # a question and its gold answers
NO_ANSWER = "no answer (a test split)"
DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'
WRITING_TAGS = re.compile(r"^(\s*\[ ?[A-Z]{2} ?\])+", re.IGNORECASE)  # such as [ WP ]
# What separates the options of MathQA, as in "a ) 38 , b ) 27.675". Some files have the options as a list in
# quotes, and some repeat the letter: "a ) a ) 38 , b ) b ) 27.675".
OPTION = re.compile(
    r"""
    (?:^|,)                # the beginning, or the comma after the previous option
    [\s['"]*               # the bracket and the quote of a list
    (?:([a-e])[ ]\)[ ])+   # the letter; if it is repeated, the group holds the last
    """,
    re.VERBOSE,
)


class LeftOut(Exception):
    """Why the dataset marks a row as unusable. The rows are counted by this reason."""


def hotpotqa(row: Fields) -> Draft:
    """HotpotQA, and 2WikiMultihopQA, which has the same format. Their test splits have no answers."""
    _value(row, "context")  # It is not read. A row without it is of another dataset.
    return _question(row, "question"), _filled_golds([row.get("answer")], "answer")


def musique(row: Fields) -> Draft:
    """MuSiQue. The Full variant has an unanswerable copy of each question."""
    aliases = _list(row, "answer_aliases")
    if not row.get("answerable", True):
        raise LeftOut("unanswerable")
    return _question(row, "question"), _filled_golds([row.get("answer"), *aliases], "answer")


def popqa(row: Fields) -> Draft:
    """PopQA. `possible_answers` is a text that contains a JSON list."""
    text = text_field(row, "possible_answers")
    try:
        golds = json.loads(text)
    except (ValueError, RecursionError):
        golds = None
    if not isinstance(golds, list):
        raise BadRow("the field possible_answers is not a JSON list")
    return _question(row, "question"), _filled_golds(golds, "possible_answers")


def gsm8k(row: Fields) -> Draft:
    """GSM8K. The gold answer follows the last "####" of the solution; commas and dollar signs are removed."""
    _, mark, number = text_field(row, "answer").rpartition("####")
    if not mark:
        raise BadRow("the field answer has no ####")
    number = re.sub(r"[,$]", "", number).strip()
    if len(number.split()) > 1:
        raise LeftOut("more than a number after the ####")
    return _question(row, "question"), (text_or_number(number, "answer"),)


def dapo(row: Fields) -> Draft:
    """DAPO-Math-17k, and its processed form, in which the prompt is a text. The wrapper is removed."""
    prompt = _value(row, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        text = _question(fields_of(prompt[0]), "content")
    else:
        text = _question(row, "prompt")
    gold = fields_of(_value(row, "reward_model")).get("ground_truth")
    return without_dapo_wrapper(text), gold_answers(gold, "ground_truth")


def without_dapo_wrapper(text: str) -> str:
    """The problem without the sentences that DAPO puts around it, which ask for another answer format."""
    return text.removeprefix(DAPO_OPENING).removesuffix(DAPO_CLOSING)


def booksum(row: Fields) -> Draft:
    """BookSum: book and chapter → summary written by people.

    These are not the paper's questions, which have a title and a text that a model wrote for each chapter.
    Only the published files of Prompt-R1 have them. Here the id of the book is the title.
    """
    title = text_field(row, "book_id").replace(".", ", ")
    summary = _text_or_blank(row, "summary_text")
    if not summary.strip():
        raise LeftOut("no summary")
    return f"Please write a short article based on the given title: {title}.", (summary,)


def writingprompts(row: Fields) -> Draft:
    """WritingPrompts: prompt → story.

    As in the published files of Prompt-R1, the prompt stays tokenised ("It 's late ."), and in the story no
    blank is left before a sign ("It's late.").
    """
    prompt = WRITING_TAGS.sub("", _text_or_blank(row, "prompt")).strip()
    story = _text_or_blank(row, "story").replace("<newline>", "\n")
    story = re.sub(r" ([.,;:!?'])", r"\1", story)
    if not prompt or not story.strip():
        raise LeftOut("empty prompt or story")
    return f"Please write a short article based on the given title: '{prompt}'", (story,)


def mathqa(row: Fields) -> Draft:
    """MathQA. The gold answer is the text of the correct option; the question does not show the options."""
    question = _question(row, "Problem")
    _, *pieces = OPTION.split(text_field(row, "options"))  # letter, text, letter, text, …
    letters, texts = pieces[::2], pieces[1::2]
    options = dict(zip(letters, texts, strict=True))
    gold = options.get(text_field(row, "correct").strip(), "").strip(" ,[]'\"")
    if not gold:
        raise LeftOut("no text of the right option")
    return question, (gold,)


def squad(row: Fields) -> Draft:
    """SQuAD v2, without contexts as in the paper. A question without gold answers is unanswerable."""
    question = _question(row, "question")
    texts = _list(fields_of(_value(row, "answers")), "text")
    if not texts:
        raise LeftOut("unanswerable")
    return question, _filled_golds(texts, "answers")


def triviaqa(row: Fields) -> Draft:
    """TriviaQA: the answer and its aliases."""
    answer = fields_of(_value(row, "answer"))
    golds = [answer.get("value"), *_list(answer, "aliases")]
    return _question(row, "question"), _filled_golds(golds, "answer")


def xsum(row: Fields) -> Draft:
    """XSum in reverse, as in the paper: summary → article."""
    document = _text_or_blank(row, "document")
    if not document.strip():
        raise LeftOut("no article")
    return f"Please write an article: {_question(row, 'summary')}", (document,)


def _question(row: Fields, field: str) -> str:
    """The question of a row. Raises LeftOut if it is blank, and BadRow if it is missing or not a text."""
    text = _text_or_blank(row, field)
    if not text.strip():
        raise LeftOut("blank question")
    return text


def _text_or_blank(row: Fields, field: str) -> str:
    """The text of a field, which may be blank; "" for null. Raises BadRow if it is missing or not a text."""
    if field in row and row[field] is None:
        return ""
    return text_field(row, field, may_be_blank=True)


def _value(row: Fields, field: str) -> Any:
    """The value of a field that all rows of the dataset have. Raises BadRow if this row lacks it."""
    if field not in row:
        raise BadRow(f"the field {field} is missing, which all rows of this dataset have")
    return row[field]


def _list(row: Fields, field: str) -> list[object]:
    """The list in a field that all rows of the dataset have. Raises BadRow if this row has none."""
    value = _value(row, field)
    if not isinstance(value, list):
        raise BadRow(f"the field {field} must be a list, not {describe(value)}")
    return value


def _filled_golds(values: Sequence[object], field: str) -> tuple[str, ...]:
    """The gold answers among the values of a field, without blank answers and repeats.

    Raises LeftOut if no answer is left, as in test splits. There TriviaQA has "<unk>" in place of an answer.
    """
    filled = [value for value in values if value not in (None, "<unk>") and str(value).strip()]
    if not filled:
        raise LeftOut(NO_ANSWER)
    return tuple(dict.fromkeys(gold_answers(filled, field)))


@dataclass(frozen=True)
class Dataset:
    """A dataset of the paper."""

    name: str  # in the paper
    published_as: str  # its name in the published files
    kind: Kind
    convert: Callable[[Fields], Draft]  # reads a row
    is_trained: bool = True  # False: the paper only tests on it.


# The keys are the names for --from.
DATASETS = {
    "2wiki": Dataset("2WikiMultihopQA", "2WikiMultihopQA", "qa", hotpotqa),
    "hotpotqa": Dataset("HotpotQA", "hotpot", "qa", hotpotqa),
    "gsm8k": Dataset("GSM8K", "gsm8k", "math", gsm8k),
    "dapo": Dataset("DAPO-Math", "dapo-math", "math", dapo),
    "musique": Dataset("MuSiQue", "MusiQue", "qa", musique),
    "popqa": Dataset("PopQA", "PopQA", "qa", popqa),
    "booksum": Dataset("BookSum", "w-book", "text", booksum),
    "writingprompts": Dataset("WritingPrompts", "wp", "text", writingprompts),
    "mathqa": Dataset("MathQA", "MathQA", "math", mathqa, is_trained=False),
    "squad": Dataset("SQuAD v2", "squad_v2", "qa", squad, is_trained=False),
    "triviaqa": Dataset("TriviaQA", "triviaqa_train", "qa", triviaqa, is_trained=False),
    "xsum": Dataset("XSum", "xum", "text", xsum, is_trained=False),
}
TRAINED = tuple(dataset.name for dataset in DATASETS.values() if dataset.is_trained)
OUT_OF_DISTRIBUTION = tuple(dataset.name for dataset in DATASETS.values() if not dataset.is_trained)


def _plain(name: str) -> str:
    """A name in lower case, without signs."""
    return re.sub("[^a-z0-9]", "", name.lower())


# The datasets by all of their names: for --from, in the paper, and in the published files.
NAMED = {
    _plain(name): dataset
    for option, dataset in DATASETS.items()
    for name in (option, dataset.name, dataset.published_as)
}


def find_dataset(name: str) -> Dataset | None:
    """The paper's dataset of this name, in any spelling. Sizes may follow it, as in hotpot-256-test."""
    return NAMED.get(_plain(re.sub(r"(-\d+)+-\w+$", "", name)))


def name_in_paper(data_source: str) -> str:
    """The paper's name of the dataset that a published row names; other names stay as they are."""
    # The rows of the published training and validation files have this name, whatever their dataset is.
    if data_source == "hotpotqa/hotpot_qa":
        return "mixed"
    dataset = find_dataset(data_source)
    return dataset.name if dataset else data_source


def kind_of_dataset(name: str) -> Kind:
    """The kind of a dataset's questions: math (the answer is a number), text (a long text) or qa (a name)."""
    dataset = find_dataset(name)
    return dataset.kind if dataset else "qa"
