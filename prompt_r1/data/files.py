"""Read and write question files, in which each row is a question."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from prompt_r1.data.datasets import kind_of_dataset, name_in_paper, without_dapo_wrapper
from prompt_r1.data.rows import (
    HUB_NAME,
    BadRow,
    Fields,
    fields_of,
    gold_answers,
    read_rows,
    text_field,
    text_of,
    text_or_number,
)
from prompt_r1.errors import UsageError
from prompt_r1.programs.files import replace_file
from prompt_r1.types import Kind, Question

ANSWER_FIELDS = ("answers", "golden_answers", "answer")  # Of these fields, the first that a row has is read.
COLUMNS = ("question", *ANSWER_FIELDS, "id", "dataset", "data_source", "kind")
CONVERT = "python -m prompt_r1.data convert"

PUBLISHED = re.compile(r"\AQuestion: (.*)\nFirst, provide a simple explanation of the question", re.DOTALL)


def load_questions(path: Path | str) -> list[Question]:
    """The questions of a file, or of hf:ORG/NAME:SPLIT. Raises UsageError with row (from 1) and reason."""
    hub = HUB_NAME.fullmatch(str(path))
    dataset = hub["repository"].partition("/")[2] if hub else Path(path).stem
    return as_questions(path, read_rows(path), dataset=dataset)


def as_questions(source: str | Path, rows: Iterable[tuple[int, object]], *, dataset: str) -> list[Question]:
    """The questions of numbered rows. Rows that name no dataset belong to `dataset`.

    A row has `question` and `answers` (or `golden_answers`, or `answer`), and may have `id`, `dataset` (or
    `data_source`) and `kind`; other fields are `extra`. Or it has the columns of the files that the paper's
    authors published. If rows without ids repeat a question, the number of the row is appended to its id.
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
    answer_field = next((name for name in ANSWER_FIELDS if name in row), None)
    if "question" not in row or answer_field is None:
        missing = "answers" if "question" in row else "question"
        columns = ", ".join(repr(name) for name in list(row)[:20]) or "none"
        raise BadRow(
            f"the field {missing} is missing (there are: {columns}): name the columns question and answer; "
            f"`{CONVERT}` reads the raw files of the datasets"
        )
    if "dataset" in row:
        dataset = text_field(row, "dataset")
    elif "data_source" in row:  # as in the files of verl and Search-R1
        dataset = name_in_paper(text_field(row, "data_source"))
    kind = cast(Kind, row.get("kind", kind_of_dataset(dataset)))
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
    """The id of a row as text. If the row has none, it is made from the text of the question."""
    return text_or_number(row["id"], "id") if "id" in row else id_from_text(text)


def _published_question(row: Fields) -> Question:
    """The question of a row with data_source, prompt[{content, role}] and reward_model{ground_truth[]}."""
    try:
        (message,) = row["prompt"]
        found = PUBLISHED.match(message["content"])
        truth = row["reward_model"]["ground_truth"]
    except (KeyError, TypeError, ValueError):  # The fields have other types or other parts.
        found = None
    if found is None:
        raise BadRow(
            "not a row of the published files, with reward_model{ground_truth} and prompt[{content}]: "
            "'Question: ', the question and the published instruction; "
            f"`{CONVERT}` reads the raw files of the datasets"
        )
    text = text_of(found[1], "question")
    dataset = name_in_paper(text_field(row, "data_source"))
    golds = gold_answers(truth, "ground_truth")
    return Question(_id_of(row, text), dataset, text, golds, kind_of_dataset(dataset))


def _refuse_whole_solutions(golds: Sequence[str]) -> None:
    """Raise BadRow if a gold answer is a whole solution of GSM8K, which no agent would repeat."""
    if any("####" in gold for gold in golds):
        raise BadRow(
            f"the answer is a whole solution with ####: `{CONVERT} --from gsm8k --in FILE --out NEW.jsonl` "
            "takes the number after it"
        )


def id_from_text(text: str) -> str:
    """The id of a question whose row has no id: the SHA-1 of its text."""
    return hashlib.sha1(text.encode()).hexdigest()


def question_key(text: str) -> str:
    """A key for comparing questions: it ignores letter case, white space and DAPO's wrapper."""
    return " ".join(without_dapo_wrapper(text).casefold().split())


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Write a .jsonl file that appears under its name only when it is complete."""
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
    # A lone surrogate in another column becomes its escape in JSON, such as \ud800.
    replace_file(path, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
