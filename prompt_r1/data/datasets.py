"""The paper's twelve datasets: their names, and how their rows are converted to questions.

Each function converts a row of one dataset, as its authors or the Hub publish it. It raises LeftOut for a row
that has no question or no answer. For a row without the fields of the dataset, it raises BadRow, or Python's
own error: LookupError, TypeError or ValueError. Then the file is of another dataset.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from prompt_r1.data.rows import BadRow, Fields, describe, gold_answers, text_field
from prompt_r1.types import Kind

Draft = tuple[str, tuple[str, ...]]  # a question and its gold answers
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
    """Why a row gives no question. The rows are counted by this reason."""


def hotpotqa(row: Fields) -> Draft:
    """HotpotQA, and 2WikiMultihopQA, which has the same fields."""
    return _text(row, "question"), _golds([row["answer"]])


def musique(row: Fields) -> Draft:
    """MuSiQue: the answer and its aliases."""
    return _text(row, "question"), _golds([row["answer"]] + row["answer_aliases"])


def popqa(row: Fields) -> Draft:
    """PopQA. `possible_answers` is a text that contains a JSON list."""
    return _text(row, "question"), _golds(json.loads(row["possible_answers"]))


def gsm8k(row: Fields) -> Draft:
    """GSM8K. The gold answer follows the last "####" of the solution; commas and dollar signs are removed."""
    _, mark, number = _text(row, "answer").rpartition("####")
    if not mark:
        raise BadRow("the field answer has no ####")
    return _text(row, "question"), _golds([re.sub("[,$]", "", number).strip()])


def dapo(row: Fields) -> Draft:
    """DAPO-Math-17k. The sentences around the problem are removed."""
    [message] = row["prompt"]
    problem = without_dapo_wrapper(_text(message, "content"))
    return problem, _golds([row["reward_model"]["ground_truth"]])


def without_dapo_wrapper(text: str) -> str:
    """The problem without the sentences that DAPO puts around it, which ask for another answer format."""
    return text.removeprefix(DAPO_OPENING).removesuffix(DAPO_CLOSING)


def booksum(row: Fields) -> Draft:
    """BookSum: book and chapter → summary written by people.

    These are not the paper's questions, which have a title and a text that a model wrote for each chapter.
    Only the published files of Prompt-R1 have them. Here the id of the book is the title.
    """
    title = _text(row, "book_id").replace(".", ", ")
    question = f"Please write a short article based on the given title: {title}."
    return question, _golds([_text(row, "summary_text")])


def writingprompts(row: Fields) -> Draft:
    """WritingPrompts: prompt → story.

    As in the published files of Prompt-R1, the prompt stays tokenised ("It 's late ."), and in the story no
    blank is left before a sign ("It's late.").
    """
    prompt = WRITING_TAGS.sub("", _text(row, "prompt")).strip()
    if not prompt:
        raise LeftOut("blank prompt")
    story = _text(row, "story").replace("<newline>", "\n")
    story = re.sub(r" ([.,;:!?'])", r"\1", story)
    return f"Please write a short article based on the given title: '{prompt}'", _golds([story])


def mathqa(row: Fields) -> Draft:
    """MathQA. The gold answer is the text of the correct option; the question does not show the options."""
    _, *pieces = OPTION.split(_text(row, "options"))  # letter, text, letter, text, …
    letters, texts = pieces[::2], pieces[1::2]
    options = dict(zip(letters, texts, strict=True))
    gold = options.get(_text(row, "correct").strip(), "").strip(" ,[]'\"")
    return _text(row, "Problem"), _golds([gold])


def squad(row: Fields) -> Draft:
    """SQuAD v2. As in the paper, contexts are left out. Questions that no context answers have no gold."""
    return _text(row, "question"), _golds(row["answers"]["text"])


def triviaqa(row: Fields) -> Draft:
    """TriviaQA: the answer and its aliases."""
    answer = row["answer"]
    return _text(row, "question"), _golds([answer["value"]] + answer["aliases"])


def xsum(row: Fields) -> Draft:
    """XSum in reverse, as in the paper: summary → article."""
    return f"Please write an article: {_text(row, 'summary')}", _golds([_text(row, "document")])


def _text(row: Fields, field: str) -> str:
    """The text of a field. Raises LeftOut if it is blank or null, and BadRow if it is not a text."""
    if row[field] is None or not str(row[field]).strip():
        raise LeftOut(f"blank {field}")
    return text_field(row, field)


def _golds(values: object) -> tuple[str, ...]:
    """The gold answers in a list, without blank answers and repeats. Raises BadRow for anything but a list.

    Raises LeftOut if no answer is left, as in test splits. There TriviaQA has "<unk>" in place of an answer.
    """
    if not isinstance(values, list):
        raise BadRow(f"expected a list of answers, not {describe(values)}")
    filled = [value for value in values if value not in (None, "<unk>") and str(value).strip()]
    if not filled:
        raise LeftOut("no answer")
    return tuple(dict.fromkeys(gold_answers(filled, "answer")))


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
    """The letters and digits of a name, in lower case."""
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
