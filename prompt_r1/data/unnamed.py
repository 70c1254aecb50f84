"""Infer the dataset and the kind of the questions of a file that names no dataset.

In the published training and validation files every row says `hotpotqa/hotpot_qa`. Questions of most datasets
show where they come from: by the paper's own openings, DAPO's wrapper, PopQA's templates, or by their form, a
problem whose answer is a number. Questions of 2WikiMultihopQA, MuSiQue and HotpotQA look alike, but these
files consist of one block of equal size for each dataset, and whole blocks can be told apart. In other files
such a question stays "mixed", which is of kind qa.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from prompt_r1.data.fields import DAPO_OPENING, kind_of
from prompt_r1.types import Question

UNNAMED = "mixed"
MOST_BLOCKS = 12

TITLE = "Please write a short article based on the given title: "
POPQA = re.compile(
    r"(?:What is .+'s occupation|In what city was .+ born|What genre is .+|In what country is .+"
    r"|Who is the (?:father|mother|author) of .+|Who was the (?:producer|director|composer) of .+"
    r"|What is .+ the capital of|What is the (?:religion|capital) of .+|Who was the screenwriter for .+"
    r"|What color is .+|What sport does .+ play)\?"
)
NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?")
FORMULA = re.compile(r"\\|\$[^$\s]+\$|[\u3400-\u4dbf\u4e00-\u9fff]|^\W*(?:please )?find\b", re.IGNORECASE)
QUANTITY = re.compile(
    r"\d+|\b(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|half|twice|double|third|quarter|dozen"
    r"|hundred)s?\b",
    re.IGNORECASE,
)
TWO_WIKI = re.compile(
    r"^(?:which film|are (?:both|the)|do |did |is |were |was |who (?:died|was born|lived)"
    r"|(?:when (?:is|was|did)|where (?:was|did)) the|what nationality"
    r"|what is the (?:date|place|cause|award))|film ",
    re.IGNORECASE,
)


def with_inferred_datasets(questions: Sequence[Question]) -> list[Question]:
    """The questions of one file in their order, with the datasets and kinds that can be inferred."""
    names = _names_of_blocks(questions) or [_name_of(question) for question in questions]
    return [
        replace(question, dataset=name, kind=kind_of(name))
        for question, name in zip(questions, names, strict=True)
    ]


def _name_of(question: Question) -> str:
    """The dataset of a single question; UNNAMED if it does not show."""
    text = question.text
    if text.startswith(TITLE):
        return "WritingPrompts" if text.startswith(f"{TITLE}'") else "BookSum"
    if text.startswith("Please write an article: "):
        return "XSum"
    if text.startswith(DAPO_OPENING):
        return "DAPO-Math"
    if _has_number(question):
        if FORMULA.search(text):
            return "DAPO-Math"
        if len(QUANTITY.findall(text)) >= 2:
            return "GSM8K"
    return "PopQA" if POPQA.fullmatch(text.strip()) else UNNAMED


def _has_number(question: Question) -> bool:
    """Whether the only gold answer is a number."""
    return len(question.answers) == 1 and bool(NUMBER.fullmatch(question.answers[0].strip()))


def _names_of_blocks(questions: Sequence[Question]) -> list[str]:
    """The dataset of each question of a file sorted by dataset; none if the file is not sorted.

    Such a file consists of blocks of equal size, each of another dataset.
    """
    for count in range(MOST_BLOCKS, 1, -1):
        size, remainder = divmod(len(questions), count)
        if remainder or size < MOST_BLOCKS:
            continue
        blocks = [_name_of_block(questions[start : start + size]) for start in range(0, len(questions), size)]
        if UNNAMED not in blocks and len(set(blocks)) == count:
            return [name for name in blocks for _ in range(size)]
    return []


def _name_of_block(block: Sequence[Question]) -> str:
    """The dataset of all questions of a block; UNNAMED if they come from several."""
    names = [_name_of(question) for question in block]
    for name in ("WritingPrompts", "BookSum", "XSum", "PopQA"):
        if names.count(name) > 0.95 * len(block):
            return name
    if all(map(_has_number, block)):
        return "DAPO-Math" if names.count("DAPO-Math") > names.count("GSM8K") else "GSM8K"
    if names.count(UNNAMED) < 0.9 * len(block):
        return UNNAMED
    if sum(len(question.answers) > 1 for question in block) > 0.1 * len(block):
        return "MuSiQue"
    likely = sum(bool(TWO_WIKI.search(question.text)) for question in block)
    return "2WikiMultihopQA" if likely > 0.5 * len(block) else "HotpotQA"
