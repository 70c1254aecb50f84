"""The paper's twelve datasets: from a raw row to a question and its gold answers.

The functions read a row as its dataset publishes it; `convert` names a row of another layout. They raise
LeftOut for a row that the dataset itself marks as unusable.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prompt_r1.data.files import text_field, without_dapo_wrapper

Row = Mapping[str, Any]
Draft = tuple[str, list[object]]  # a question and its gold answers, of which some may be blank or repeated
WRITING_TAGS = re.compile(r"^(?:\s*\[\s*(?:WP|EU|CW|TT|PI|RF|MP|IP|PM|OT|FF|SP)\s*\])+", re.IGNORECASE)
OPTION_LETTER = re.compile(r"(?<![^\s,\['\"])([a-e]) \) ")  # "a ) 38 , b ) 27.675"


class LeftOut(Exception):
    """The dataset marks this row as unusable, and why. The rows are counted by this reason."""


@dataclass(frozen=True)
class Dataset:
    """A dataset: its name in the paper, and how to convert a row."""

    name: str
    convert: Callable[[Row], Draft]
    trained: bool = True  # part of the training mix; the others are out-of-distribution tests


def hotpotqa(row: Row) -> Draft:
    """HotpotQA, and 2WikiMultihopQA, which has the same format."""
    return row["question"], [row["answer"]]


def musique(row: Row) -> Draft:
    """MuSiQue. The Full variant has an unanswerable copy of each question."""
    if row.get("answerable") is False:
        raise LeftOut("unanswerable")
    return row["question"], [row["answer"]] + row["answer_aliases"]


def popqa(row: Row) -> Draft:
    """PopQA. `possible_answers` is a text that contains a JSON list."""
    return row["question"], json.loads(row["possible_answers"])


def gsm8k(row: Row) -> Draft:
    """GSM8K. The gold answer follows the last "####" of the solution; commas and dollar signs are removed."""
    number = row["answer"].rsplit("####", 1)[1]
    return row["question"], [re.sub(r"[,$\s]", "", number)]


def dapo(row: Row) -> Draft:
    """DAPO-Math-17k. The wrapper around the problem is removed."""
    return without_dapo_wrapper(row["prompt"][0]["content"]), [row["reward_model"]["ground_truth"]]


def booksum(row: Row) -> Draft:
    """BookSum: book and chapter → summary written by people.

    A model wrote the paper's titles and texts from the chapters. They cannot be reproduced from the dump,
    but are in the paper's published files.
    """
    title = text_field(row, "book_id").replace(".", ", ")
    return f"Please write a short article based on the given title: {title}.", [row["summary_text"]]


def writingprompts(row: Row) -> Draft:
    """WritingPrompts: prompt → story. The dump has both tokenised."""
    prompt, story = detokenise(WRITING_TAGS.sub("", row["prompt"])), detokenise(row["story"])
    if not prompt:
        raise LeftOut("empty prompt")
    return f"Please write a short article based on the given title: '{prompt}'", [story]


def mathqa(row: Row) -> Draft:
    """MathQA. The gold answer is the text of the correct option; the question does not show the options."""
    _, *pieces = OPTION_LETTER.split(row["options"])
    options = dict(zip(pieces[::2], pieces[1::2], strict=True))
    return row["Problem"], [options.get(row["correct"].strip(), "").strip(" ,[]'\"")]


def squad(row: Row) -> Draft:
    """SQuAD v2, without contexts as in the paper. Unanswerable questions have no gold answers."""
    return row["question"], row["answers"]["text"]


def triviaqa(row: Row) -> Draft:
    """TriviaQA: the answer and its aliases. In test splits the answer is "<unk>"."""
    golds = [row["answer"]["value"]] + row["answer"]["aliases"]
    return row["question"], [gold for gold in golds if gold != "<unk>"]


def xsum(row: Row) -> Draft:
    """XSum in reverse, as in the paper: summary → article."""
    return f"Please write an article: {text_field(row, 'summary')}", [row["document"]]


def detokenise(text: str) -> str:
    """Undo the tokenisation of WritingPrompts: `` were n't '' → "weren't", <newline> → a line break."""
    text = re.sub(r"\s*<newline>\s*", "\n", text)
    text = re.sub(r"`` ?", '"', re.sub(r" ?''", '"', text))
    text = re.sub(r"(?<=\w) (n't|'(?:s|m|d|ll|re|ve)\b)", r"\1", text, flags=re.IGNORECASE)
    text = re.sub(r"\b(gon|wan|got|can|gim|lem) (na|ta|not|me)\b", r"\1\2", text, flags=re.IGNORECASE)
    text = re.sub(r" +([.,;:!?%)\]])", r"\1", re.sub(r"([(\[$]) +", r"\1", text))
    return "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()


DATASETS = {
    "2wiki": Dataset("2WikiMultihopQA", hotpotqa),
    "hotpotqa": Dataset("HotpotQA", hotpotqa),
    "gsm8k": Dataset("GSM8K", gsm8k),
    "dapo": Dataset("DAPO-Math", dapo),
    "musique": Dataset("MuSiQue", musique),
    "popqa": Dataset("PopQA", popqa),
    "booksum": Dataset("BookSum", booksum),
    "writingprompts": Dataset("WritingPrompts", writingprompts),
    "mathqa": Dataset("MathQA", mathqa, trained=False),
    "squad": Dataset("SQuAD v2", squad, trained=False),
    "triviaqa": Dataset("TriviaQA", triviaqa, trained=False),
    "xsum": Dataset("XSum", xsum, trained=False),
}
PAPER_MIX = tuple(dataset.name for dataset in DATASETS.values() if dataset.trained)
