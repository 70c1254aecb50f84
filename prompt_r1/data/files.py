"""Read and write question files: each row of a file is a question with its gold answers."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from prompt_r1.data.rows import HUB_NAME, BadRow, Fields, fields_of, read_rows, text_field, text_or_number
from prompt_r1.errors import UsageError
from prompt_r1.programs.files import replace_file
from prompt_r1.types import Kind, Question

ANSWER_FIELDS = ("answers", "golden_answers", "answer")  # The first field that is not empty counts.
COLUMNS = ("question", *ANSWER_FIELDS, "id", "dataset", "data_source", "kind")
CONVERT = "python -m prompt_r1.data convert"

# A dataset's name in the published files → its name in the paper. In the published training and validation
# files, the rows of all eight datasets say hotpot_qa.
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
# The names of these datasets in lower case, without signs. DAPO-Math has several.
MATH_DATASETS = {"gsm8k", "math", "math500", "mathqa"}
TEXT_DATASETS = {"booksum", "writingprompts", "xsum"}

PUBLISHED = re.compile(r"\AQuestion: (.*)\nFirst, provide a simple explanation of the question", re.DOTALL)
DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'


def load_questions(path: Path | str) -> list[Question]:
    """The questions of a file, or of hf:ORG/NAME:SPLIT. Raises UsageError with row (from 1) and reason."""
    hub = HUB_NAME.fullmatch(str(path))
    dataset = hub["repository"].partition("/")[2] if hub else Path(path).stem
    return as_questions(path, read_rows(path), dataset=dataset)


def as_questions(source: str | Path, rows: Iterable[tuple[int, object]], *, dataset: str) -> list[Question]:
    """The questions of numbered rows. Rows that name no dataset belong to `dataset`.

    A row has `question` and `answers` (or `golden_answers`, or `answer`), and may have `id`, `dataset` (or
    `data_source`) and `kind`; other fields are `extra`. Or it has the columns of the published files. If rows
    without ids repeat a question, the number of the row is appended to its id. Raises UsageError.
    """
    questions: dict[str, Question] = {}
    for number, row in rows:
        try:
            fields = fields_of(row)
            if "reward_model" in fields and "question" not in fields:
                question = _published_question(fields)
            else:
                question = _question(fields, dataset)
            _refuse_whole_solutions(question.answers)
            if question.id in questions:
                if "id" in fields:
                    raise BadRow(f"another row has the id {question.id!r} too")
                question = replace(question, id=f"{question.id}-{number}")
        except BadRow as reason:
            raise UsageError(f"{source}, row {number}: {reason}") from None
        questions[question.id] = question
    if not questions:
        raise UsageError(f"{source}: there are no questions in it")
    return list(questions.values())


def _question(row: Fields, dataset: str) -> Question:
    """The question of a row with the columns of a question file."""
    answer_fields = [name for name in ANSWER_FIELDS if name in row]
    if "question" not in row or not answer_fields:
        missing = "answers" if "question" in row else "question"
        columns = ", ".join(repr(name) for name in list(row)[:20]) or "none"
        raise BadRow(
            f"the field {missing} is missing (there are: {columns}): name the columns question and answer; "
            f"`{CONVERT}` reads the raw files of the datasets"
        )
    # If all are empty, `gold_answers` says what is wrong with the first.
    answer_field = next((name for name in answer_fields if not _is_empty(row[name])), answer_fields[0])
    if "dataset" in row:
        dataset = text_field(row, "dataset")
    elif "data_source" in row:
        dataset = dataset_name(text_field(row, "data_source"))
    kind = cast(Kind, row.get("kind", kind_of(dataset)))
    if kind not in get_args(Kind):
        raise BadRow(f"kind is {kind!r}; choose one of {', '.join(get_args(Kind))}")
    text = text_field(row, "question")
    return Question(
        id=_id_of(row, text),
        dataset=dataset,
        text=text,
        answers=gold_answers(row[answer_field], answer_field),
        kind=kind,
        extra={name: value for name, value in row.items() if name not in COLUMNS},
    )


def _id_of(row: Fields, text: str) -> str:
    """The id of a row as text, or without one an id that is made from the question's text."""
    return text_or_number(row["id"], "id") if "id" in row else id_from_text(text)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list) and not value)


def _published_question(row: Fields) -> Question:
    """The question of a row with data_source, prompt[{content, role}] and reward_model{ground_truth[]}."""
    try:
        (message,) = row["prompt"]
        found = PUBLISHED.match(message["content"])
        truth = row["reward_model"]["ground_truth"]
    except (KeyError, TypeError, ValueError):  # The fields have other types or other parts.
        found = truth = None
    if found is None or truth is None:
        raise BadRow(
            "not a row of the published files, with reward_model{ground_truth} and prompt[{content}]: "
            "'Question: ', the question and the published instruction; "
            f"`{CONVERT}` reads the raw files of the datasets"
        )
    text = text_or_number(found[1], "question")
    dataset = dataset_name(text_field(row, "data_source"))
    golds = gold_answers(truth, "ground_truth")
    return Question(_id_of(row, text), dataset, text, golds, kind_of(dataset))


def _refuse_whole_solutions(golds: Sequence[str]) -> None:
    """Raise BadRow if a gold answer is a whole solution of GSM8K, which no agent would repeat."""
    if any("####" in gold for gold in golds):
        raise BadRow(
            f"the answer is a whole solution with ####: `{CONVERT} --from gsm8k --in FILE --out NEW.jsonl` "
            "takes the number after it"
        )


def gold_answers(value: object, field: str) -> tuple[str, ...]:
    """The gold answers in a field: a single value, a list, or a text with a JSON list.

    Raises BadRow if there is none.
    """
    if isinstance(value, str):
        value = _list_in_text(value, field)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise BadRow(f"the field {field} has no gold answer")
    return tuple(text_or_number(gold, field) for gold in values)


def _list_in_text(text: str, field: str) -> list[object]:
    """The texts of a JSON list in a cell, or the whole text if it is no list.

    A list begins with a bracket and a quote. An interval, such as [0, 1), is no list. Raises BadRow for a
    broken list.
    """
    if not re.match(r"""\s*\[\s*["'\]]""", text):
        return [text]
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        items = None
    if isinstance(items, list) and all(isinstance(item, str) for item in items):
        return items
    raise BadRow(
        f"the field {field} holds a list that is not JSON, {text[:40]!r}: write it as "
        '["Paris", "City of Paris"]'
    )


def id_from_text(text: str) -> str:
    """The id of a question whose row has no id: the SHA-1 of its text."""
    return hashlib.sha1(text.encode()).hexdigest()


def dataset_name(data_source: str) -> str:
    """The paper's name of a dataset in a published file: hotpot-256-test → HotpotQA; others unchanged."""
    return PAPER_NAMES.get(re.sub(r"(-\d+)+-\w+$", "", data_source), data_source)


def kind_of(dataset: str) -> Kind:
    """The kind of a dataset's questions: math (the answer is a number), text (a long text) or qa (a name)."""
    name = re.sub("[^a-z0-9]", "", dataset.lower())
    if name in MATH_DATASETS or name.startswith("dapo"):
        return "math"
    return "text" if name in TEXT_DATASETS else "qa"


def without_dapo_wrapper(text: str) -> str:
    """The problem without the sentences that DAPO puts around it, which ask for another answer format."""
    return text.removeprefix(DAPO_OPENING).removesuffix(DAPO_CLOSING)


def question_key(text: str) -> str:
    """A key for comparing questions: it ignores letter case, white space and DAPO's wrapper."""
    return " ".join(without_dapo_wrapper(text).casefold().split())


def check_ids(questions: Sequence[Question]) -> None:
    """Raise UsageError if two questions have the same id: a file with both could not be read again."""
    for identity, count in Counter(question.id for question in questions).items():
        if count > 1:
            raise UsageError(f"the id {identity!r} occurs in two files; give each question once")


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Write a .jsonl file that appears under its name only when it is complete. Raises UsageError."""
    if path.suffix != ".jsonl":
        raise UsageError(f"{path}: only .jsonl files can be written")
    if not questions:
        raise UsageError(f"{path}: there are no questions to write")
    lines = []
    for question in questions:
        row = {
            **question.extra,
            "id": question.id,
            "dataset": question.dataset,
            "question": question.text,
            "answers": question.answers,
            "kind": question.kind,
        }
        lines.append(json.dumps(row, ensure_ascii=False, default=str))  # `default`: a column may hold dates.
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())
