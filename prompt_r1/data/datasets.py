"""Convert one row of each dataset's raw dump to a question and its gold answers, as in the paper.

`DATASETS` has them by their names for `convert --from`. The functions raise LeftOut for a row that the
dataset itself marks as unusable, and BadRow for a row that does not have the dataset's layout.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from prompt_r1.data.fields import (
    BadRow,
    Fields,
    describe,
    gold_answers,
    text_field,
    text_or_number,
    without_dapo_wrapper,
)

NO_ANSWER = "no answer (a test split)"
WRITING_TAGS = re.compile(r"^(?:\s*\[\s*(?:WP|EU|CW|TT|PI|RF|MP|IP|PM|OT|FF|SP)\s*\])+", re.IGNORECASE)


class LeftOut(Exception):
    """The dataset marks this row as unusable, and why. The rows are counted by this reason."""


@dataclass(frozen=True)
class Draft:
    """The question of a row. `id` is the dataset's own, or "" if it has none."""

    text: str
    answers: tuple[str, ...]
    id: str = ""


@dataclass(frozen=True)
class Dataset:
    """A dataset: its name in the paper, the columns to read, and the function that converts a row."""

    name: str
    columns: tuple[str, ...]
    convert: Callable[[Fields], Draft]


def hotpotqa(row: Fields) -> Draft:
    """HotpotQA, and 2WikiMultihopQA, which has the same format. Their test splits have no answers."""
    return Draft(text_field(row, "question"), (_answer(row, "answer"),), _id(row, "_id", "id"))


def musique(row: Fields) -> Draft:
    """MuSiQue. The Full variant has an unanswerable copy of each question."""
    if row.get("answerable") is False:
        raise LeftOut("unanswerable")
    answer = _answer(row, "answer")
    aliases = _list(row.get("answer_aliases") or [], "answer_aliases")
    return Draft(text_field(row, "question"), _unique([answer, *aliases], "answer_aliases"), _id(row, "id"))


def popqa(row: Fields) -> Draft:
    """PopQA. `possible_answers` is a text that contains a JSON list."""
    value = row.get("possible_answers")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRow("the field possible_answers is not a JSON list") from None
    golds = _unique(_list(value, "possible_answers"), "possible_answers")
    return Draft(text_field(row, "question"), golds, _id(row, "id"))


def gsm8k(row: Fields) -> Draft:
    """GSM8K. The gold answer follows the last "####" of the solution; commas and dollar signs are removed."""
    _, mark, number = text_field(row, "answer").rpartition("####")
    if not mark:
        raise BadRow("the field answer has no ####")
    number = re.sub(r"[,$\s]", "", number)
    return Draft(text_field(row, "question"), (text_or_number(number, "answer"),))


def dapo(row: Fields) -> Draft:
    """DAPO-Math-17k, and its processed form, whose prompt and solution are texts. The wrapper is removed."""
    prompt = row.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
        prompt = prompt[0].get("content")
    reward_model = row.get("reward_model")
    gold = reward_model.get("ground_truth") if isinstance(reward_model, dict) else row.get("solution")
    text = without_dapo_wrapper(text_field({"prompt": prompt}, "prompt"))
    return Draft(text, gold_answers(gold, "ground_truth"))


def booksum(row: Fields) -> Draft:
    """BookSum: book and chapter → summary written by people.

    A model wrote the paper's titles and texts from the chapters. They cannot be reproduced from the dump,
    but are in the paper's published files. Reads kmfoda/booksum (.csv) and ubaada/booksum-complete-cleaned.
    """
    if "book_title" in row:
        title = f"{text_field(row, 'book_title')}, {text_field(row, 'chapter_id')}"
        summaries = _list(row.get("summary"), "summary")
        texts = [part.get("text") for part in summaries if isinstance(part, dict)]
    else:
        if "summary_path" in row and not {"summary_text", "chapter", "content"} & row.keys():
            raise BadRow(
                "this file of Salesforce/booksum has the paths of the texts, not the texts; give a CSV of "
                "kmfoda/booksum (or ubaada/booksum-complete-cleaned), which has them"
            )
        title = text_field(row, "book_id").replace(".", ", ")
        texts = [row.get("summary_text")]
    golds = [text for text in texts if isinstance(text, str) and text.strip()]
    if not golds:
        raise LeftOut("no summary")
    return Draft(f"Please write a short article based on the given title: {title}.", tuple(golds))


def writingprompts(row: Fields) -> Draft:
    """WritingPrompts: prompt → story. The dump has both tokenised."""
    prompt = detokenise(WRITING_TAGS.sub("", text_field(row, "prompt")))
    story = detokenise(text_field(row, "story"))
    if not prompt or not story:
        raise LeftOut("empty prompt or story")
    return Draft(f"Please write a short article based on the given title: '{prompt}'", (story,))


def mathqa(row: Fields) -> Draft:
    """MathQA. The gold answer is the text of the correct option; the question does not show the options."""
    options = text_field(row, "options")
    letters = list(re.finditer(r"(?<![^\s,\['\"])([a-e]) \) ", options))  # "a ) 38 , b ) 27.675"
    ends = [letter.start() for letter in letters[1:]] + [len(options)]
    texts = {
        letter[1]: options[letter.end() : end].strip(" ,[]'\"")
        for letter, end in zip(letters, ends, strict=True)
    }
    gold = texts.get(text_field(row, "correct").strip())
    if not gold:
        raise LeftOut("no text of the right option")
    return Draft(text_field(row, "Problem"), (gold,))


def squad(row: Fields, *, with_context: bool = False, unanswerable: str = "") -> Draft:
    """SQuAD v2, without contexts as in the paper unless `with_context`.

    A question without gold answers is unanswerable. It is left out, unless `unanswerable` gives its gold.
    """
    answers = row.get("answers")
    golds = _list(answers.get("text") if isinstance(answers, dict) else answers, "answers")
    golds = [text_field(gold, "text") if isinstance(gold, dict) else gold for gold in golds]
    if not golds and not unanswerable:
        raise LeftOut("unanswerable")
    text = text_field(row, "question")
    if with_context:
        text = f"{text_field(row, 'context')}\n\n{text}"
    return Draft(text, _unique(golds or [unanswerable], "answers"), _id(row, "id"))


def triviaqa(row: Fields) -> Draft:
    """TriviaQA: the answer and its aliases. Keys are capitalised in the official JSON, not on the hub."""
    row = {key.lower(): value for key, value in row.items()}
    answer = row.get("answer")
    if not isinstance(answer, dict):
        raise LeftOut(NO_ANSWER)
    answer = {key.lower(): value for key, value in answer.items()}
    value = _answer(answer, "value")
    aliases = _list(answer.get("aliases") or [], "aliases")
    golds = _unique([value, *aliases], "aliases")
    return Draft(text_field(row, "question"), golds, _id(row, "question_id", "questionid"))


def xsum(row: Fields) -> Draft:
    """XSum in reverse, as in the paper: summary → article."""
    document, summary = row.get("document"), text_field(row, "summary")
    if not isinstance(document, str) or not document.strip():
        raise LeftOut("no article")
    return Draft(f"Please write an article: {summary}", (document,), _id(row, "id"))


def narrativeqa(row: Fields) -> Draft:
    """NarrativeQA, without its books. Reads qaps.csv, or the hub's nested rows."""
    question = row.get("question")
    if isinstance(question, dict):
        golds = _list(row.get("answers"), "answers")
        golds = [text_field(gold, "text") if isinstance(gold, dict) else gold for gold in golds]
        return Draft(text_field(question, "text"), _unique(golds, "answers"))
    golds = [row[name] for name in ("answer1", "answer2") if name in row]
    return Draft(text_field(row, "question"), _unique(golds, "answer1"))


DATASETS = {
    "2wiki": Dataset("2WikiMultihopQA", ("_id", "id", "question", "answer", "answer_id"), hotpotqa),
    "booksum": Dataset(
        "BookSum", ("book_id", "summary_text", "book_title", "chapter_id", "summary"), booksum
    ),
    "dapo": Dataset("DAPO-Math", ("prompt", "reward_model", "solution"), dapo),
    "gsm8k": Dataset("GSM8K", ("question", "answer"), gsm8k),
    "hotpotqa": Dataset("HotpotQA", ("_id", "id", "question", "answer"), hotpotqa),
    "mathqa": Dataset("MathQA", ("Problem", "options", "correct"), mathqa),
    "musique": Dataset("MuSiQue", ("id", "question", "answer", "answer_aliases", "answerable"), musique),
    "narrativeqa": Dataset("NarrativeQA", ("question", "answers"), narrativeqa),
    "popqa": Dataset("PopQA", ("id", "question", "possible_answers"), popqa),
    "squad": Dataset("SQuAD v2", ("id", "question", "answers", "context"), squad),
    "triviaqa": Dataset("TriviaQA", ("question_id", "question", "answer"), triviaqa),
    "writingprompts": Dataset("WritingPrompts", ("prompt", "story"), writingprompts),
    "xsum": Dataset("XSum", ("id", "document", "summary"), xsum),
}


def detokenise(text: str) -> str:
    """Undo the tokenisation of WritingPrompts: `` were n't '' → "weren't", <newline> → a line break."""
    text = re.sub(r"\s*<newline>\s*", "\n", text)
    text = re.sub(r"`` ?", '"', re.sub(r" ?''", '"', text))
    text = re.sub(r"(?<=\w) (n't|'(?:s|m|d|ll|re|ve)\b)", r"\1", text, flags=re.IGNORECASE)
    text = re.sub(r"\b(gon|wan|got|can|gim|lem) (na|ta|not|me)\b", r"\1\2", text, flags=re.IGNORECASE)
    text = re.sub(r" +([.,;:!?%)\]])", r"\1", re.sub(r"([(\[$]) +", r"\1", text))
    return "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()


def _list(value: object, field: str) -> list[object]:
    """Return the value. Raises BadRow if it is not a list."""
    if not isinstance(value, list):
        raise BadRow(f"the field {field} must be a list, not {describe(value)}")
    return value


def _answer(row: Fields, field: str) -> str:
    """The answer of a row. Raises LeftOut if it is empty, as in test splits."""
    if row.get(field) in (None, "", "<unk>"):
        raise LeftOut(NO_ANSWER)
    return text_or_number(row[field], field)


def _unique(golds: list[object], field: str) -> tuple[str, ...]:
    """The gold answers in their order, without blank ones and repeats. Raises LeftOut if none is left."""
    texts = []
    for gold in golds:
        if isinstance(gold, str) and not gold.strip():
            continue
        texts.append(text_or_number(gold, field))
    if not texts:
        raise LeftOut(NO_ANSWER)
    return tuple(dict.fromkeys(texts))


def _id(row: Fields, *fields: str) -> str:
    """The first of these fields that is set, or "" if none is."""
    for field in fields:
        if row.get(field) not in (None, ""):
            return text_or_number(row[field], field)
    return ""
