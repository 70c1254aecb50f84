"""The paper's twelve datasets: convert their rows to questions, and draw the training mix.

Each function reads a row of one dataset, as its authors or the Hub publish it. It raises LeftOut for a row
that the dataset itself marks as unusable, and BadRow for a row that lacks a column of the dataset: then the
file is of another dataset.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.files import gold_answers, id_from_text, kind_of, question_key, without_dapo_wrapper
from prompt_r1.data.rows import (
    BadRow,
    Fields,
    NumberedRows,
    describe,
    fields_of,
    read_rows,
    text_field,
    text_of,
    text_or_number,
)
from prompt_r1.errors import UsageError
from prompt_r1.f1 import normalise
from prompt_r1.types import Question

Draft = tuple[str, tuple[str, ...]]  # a question and its gold answers
NO_ANSWER = "no answer (a test split)"
WRITING_TAGS = re.compile(r"^(?:\s*\[\s*(?:WP|EU|CW|TT|PI|RF|MP|IP|PM|OT|FF|SP)\s*\])+", re.IGNORECASE)
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
    _require(row, "context")  # It is not read. A row without it is of another dataset.
    return _question(row, "question"), _filled_golds([row.get("answer")], "answer")


def musique(row: Fields) -> Draft:
    """MuSiQue. The Full variant has an unanswerable copy of each question."""
    _require(row, "answer_aliases")
    if str(row.get("answerable", True)).lower() != "true":  # In a table, the cell is a text.
        raise LeftOut("unanswerable")
    aliases = _list(row["answer_aliases"] or [], "answer_aliases")
    return _question(row, "question"), _filled_golds([row.get("answer"), *aliases], "answer")


def popqa(row: Fields) -> Draft:
    """PopQA. `possible_answers` is a text that contains a JSON list."""
    text = text_field(row, "possible_answers")
    try:
        golds = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow("the field possible_answers is not a JSON list") from None
    golds = _list(golds, "possible_answers")
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
    _require(row, "prompt", "reward_model")
    prompt = row["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = fields_of(prompt[0]).get("content")
    gold = fields_of(row["reward_model"]).get("ground_truth")
    text = without_dapo_wrapper(_question({"prompt": prompt}, "prompt"))
    return text, gold_answers(gold, "ground_truth")


def booksum(row: Fields) -> Draft:
    """BookSum: book and chapter → summary written by people.

    These are not the paper's questions, which have a title and a text that a model wrote for each chapter.
    Only the published files of Prompt-R1 have them. Here the id of the book is the title.
    """
    if "summary_text" not in row:  # The file of Salesforce/booksum has the paths of the texts instead.
        raise BadRow("the field summary_text is missing; give a CSV of kmfoda/booksum, which has the texts")
    title = text_field(row, "book_id").replace(".", ", ")
    summary = _text_or_blank(row, "summary_text")
    if not summary:
        raise LeftOut("no summary")
    return f"Please write a short article based on the given title: {title}.", (summary,)


def writingprompts(row: Fields) -> Draft:
    """WritingPrompts: prompt → story. The dump has both tokenised."""
    prompt = detokenise(WRITING_TAGS.sub("", _text_or_blank(row, "prompt")))
    story = detokenise(_text_or_blank(row, "story"))
    if not prompt or not story:
        raise LeftOut("empty prompt or story")
    return f"Please write a short article based on the given title: '{prompt}'", (story,)


def prompts_and_stories(path: Path) -> NumberedRows:
    """The rows of WritingPrompts: line n of X.wp_source is the prompt, line n of X.wp_target its story."""
    stories_path = path.with_suffix(".wp_target")
    if not stories_path.is_file():
        raise UsageError(f"{path}: its stories are missing, which belong in {stories_path}")
    prompts = text_of(path).strip("\n").split("\n")
    stories = text_of(stories_path).strip("\n").split("\n")
    if len(prompts) != len(stories):
        raise UsageError(f"{path} and {stories_path.name} have different numbers of lines")
    for number, (prompt, story) in enumerate(zip(prompts, stories, strict=True), start=1):
        yield number, {"prompt": prompt, "story": story}


def mathqa(row: Fields) -> Draft:
    """MathQA. The gold answer is the text of the correct option; the question does not show the options."""
    _require(row, "Problem", "options", "correct")
    _, *pieces = OPTION.split(text_field(row, "options"))  # letter, text, letter, text, …
    letters, texts = pieces[::2], pieces[1::2]
    options = dict(zip(letters, texts, strict=True))
    gold = options.get(text_field(row, "correct").strip(), "").strip(" ,[]'\"")
    if not gold:
        raise LeftOut("no text of the right option")
    return _question(row, "Problem"), (gold,)


def squad(row: Fields) -> Draft:
    """SQuAD v2, without contexts as in the paper. A question without gold answers is unanswerable.

    The Hub has `answers` as {text: […]}, the project's own JSON as [{text: …}].
    """
    _require(row, "question", "answers")
    answers = row["answers"]
    if isinstance(answers, Mapping):
        texts = _list(answers.get("text"), "answers")
    else:
        texts = [text_field(fields_of(answer), "text") for answer in _list(answers, "answers")]
    if not texts:
        raise LeftOut("unanswerable")
    return _question(row, "question"), _filled_golds(texts, "answers")


def triviaqa(row: Fields) -> Draft:
    """TriviaQA: the answer and its aliases. In the project's own JSON the names begin with capitals."""
    row = {name.lower(): value for name, value in row.items()}
    if "answer" not in row:
        raise LeftOut(NO_ANSWER)
    answer = {name.lower(): value for name, value in fields_of(row["answer"]).items()}
    aliases = _list(answer.get("aliases") or [], "aliases")
    return _question(row, "question"), _filled_golds([answer.get("value"), *aliases], "answer")


def xsum(row: Fields) -> Draft:
    """XSum in reverse, as in the paper: summary → article."""
    document = _text_or_blank(row, "document")
    if not document:
        raise LeftOut("no article")
    return f"Please write an article: {_question(row, 'summary')}", (document,)


def detokenise(text: str) -> str:
    """Undo the tokenisation of WritingPrompts: `` were n't '' → "weren't", <newline> → a line break."""
    text = re.sub(r"\s*<newline>\s*", "\n", text)
    text = re.sub(r" ?''", '"', text)  # closing quotes
    text = re.sub(r"`` ?", '"', text)  # opening quotes
    text = re.sub(r"(?<=\w) (n't|'(?:s|m|d|ll|re|ve)\b)", r"\1", text, flags=re.IGNORECASE)
    text = re.sub(r"\b(gon|wan|got|can|gim|lem) (na|ta|not|me)\b", r"\1\2", text, flags=re.IGNORECASE)
    text = re.sub(r"([(\[$]) +", r"\1", text)
    text = re.sub(r" +([.,;:!?%)\]])", r"\1", text)
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return "\n".join(lines).strip()


def _question(row: Fields, field: str) -> str:
    """The question of a row. Raises LeftOut if it is blank, and BadRow if it is missing or not a text."""
    text = _text_or_blank(row, field)
    if not text:
        raise LeftOut("blank question")
    return text


def _text_or_blank(row: Fields, field: str) -> str:
    """The text of a field, "" if it is blank or null. Raises BadRow if the field is missing or not a text."""
    is_blank = field in row and (row[field] is None or not str(row[field]).strip())
    return "" if is_blank else text_field(row, field)


def _require(row: Fields, *columns: str) -> None:
    """Raise BadRow if a row lacks one of these columns, which all rows of the dataset have."""
    for column in columns:
        if column not in row:
            raise BadRow(f"the field {column} is missing, which all rows of this dataset have")


def _list(value: object, field: str) -> list[object]:
    """Return the value. Raises BadRow if it is not a list."""
    if not isinstance(value, list):
        raise BadRow(f"the field {field} must be a list, not {describe(value)}")
    return value


def _filled_golds(values: Sequence[object], field: str) -> tuple[str, ...]:
    """The gold answers among the values of a field, without blank answers and repeats.

    Raises LeftOut if no answer is left, as in test splits.
    """
    filled = [value for value in values if value not in (None, "<unk>") and str(value).strip()]
    if not filled:
        raise LeftOut(NO_ANSWER)
    return tuple(dict.fromkeys(gold_answers(filled, field)))


# The name for --from → the dataset's name in the paper, and the function that converts its rows.
_TRAINING_MIX: Mapping[str, tuple[str, Callable[[Fields], Draft]]] = {
    "2wiki": ("2WikiMultihopQA", hotpotqa),
    "hotpotqa": ("HotpotQA", hotpotqa),
    "gsm8k": ("GSM8K", gsm8k),
    "dapo": ("DAPO-Math", dapo),
    "musique": ("MuSiQue", musique),
    "popqa": ("PopQA", popqa),
    "booksum": ("BookSum", booksum),
    "writingprompts": ("WritingPrompts", writingprompts),
}
_OUT_OF_DISTRIBUTION_TESTS: Mapping[str, tuple[str, Callable[[Fields], Draft]]] = {
    "mathqa": ("MathQA", mathqa),
    "squad": ("SQuAD v2", squad),
    "triviaqa": ("TriviaQA", triviaqa),
    "xsum": ("XSum", xsum),
}
CONVERTED = {**_TRAINING_MIX, **_OUT_OF_DISTRIBUTION_TESTS}
TRAINED = tuple(name for name, _ in _TRAINING_MIX.values())
OUT_OF_DISTRIBUTION = tuple(name for name, _ in _OUT_OF_DISTRIBUTION_TESTS.values())


def convert(name: str, sources: Sequence[str]) -> tuple[list[Question], Counter[str]]:
    """Convert raw dumps of a dataset. Returns the questions without repeats, and what was left out.

    The rows that were left out are counted by reason. Raises UsageError with the file, the row and the
    reason, and if no question is left.
    """
    dataset, question_of = CONVERTED[name]
    questions: dict[str, Question] = {}  # question_key → question
    left_out: Counter[str] = Counter()
    for source in sources:
        for number, row in rows_of_dump(source):
            try:
                text, golds = question_of(fields_of(row))
            except LeftOut as reason:
                left_out[str(reason)] += 1
                continue
            except BadRow as reason:
                raise UsageError(f"{source}, row {number}: {reason}") from None
            key = question_key(text)
            if not any(normalise(gold) for gold in golds):
                left_out["every gold is empty after normalisation"] += 1
            elif key in questions:
                left_out["asked before"] += 1
            else:
                questions[key] = Question(id_from_text(text), dataset, text, golds, kind_of(dataset))
    if not questions:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "no rows"
        raise UsageError(f"{sources[0]}: no question is left ({reasons})")
    return list(questions.values()), left_out


def rows_of_dump(source: str) -> NumberedRows:
    """The rows of a raw file. Only WritingPrompts has a format of its own."""
    return prompts_and_stories(Path(source)) if source.endswith(".wp_source") else read_rows(source)


def mix(
    questions: Sequence[Question], per_dataset: int, *, seed: int, exclude: Sequence[Question] = ()
) -> list[Question]:
    """Draw `per_dataset` random questions of each dataset, in random order.

    Questions that differ only in case or white space count as one, and questions in `exclude` (the test
    files) are never drawn.
    """
    seen = {question_key(question.text) for question in exclude}
    ids: set[str] = set()
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        key = question_key(question.text)
        if key in seen:
            continue
        if question.id in ids:  # Two datasets may use the same ids.
            question = replace(question, id=id_from_text(question.text))
        seen.add(key)
        ids.add(question.id)
        by_dataset.setdefault(question.dataset, []).append(question)
    drawn: list[Question] = []
    for dataset, candidates in sorted(by_dataset.items()):
        random.Random(f"mix {seed} {dataset}").shuffle(candidates)
        drawn += candidates[:per_dataset]
    random.Random(f"mix {seed} 0").shuffle(drawn)
    return drawn
