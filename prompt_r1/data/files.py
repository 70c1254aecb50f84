"""Read and write question files."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from prompt_r1.data.rows import (
    LONGEST_TEXT,
    BadRow,
    Fields,
    gold_answers,
    read_rows,
    text_field,
    text_or_number,
)
from prompt_r1.errors import UsageError
from prompt_r1.foreign import json_object, replace_file
from prompt_r1.protocol import PAPER_INSTRUCTION
from prompt_r1.types import Kind, Question

ANSWER_FIELDS = ("answers", "golden_answers", "answer")
COLUMNS = ("question", *ANSWER_FIELDS, "id", "dataset", "data_source", "kind", "prompt", "reward_model")
EXTRA = "extra_info"  # the column of a parquet file that holds `Question.extra` as a JSON object
OWN_NAMES = (
    "`python -m prompt_r1.data convert --from questions --question-field COLUMN --answer-field COLUMN` takes "
    "other names"
)
QUESTION_MARK = "Question: "
INSTRUCTION_START = "\nFirst, provide a simple explanation of the question"

# Names of the datasets in the published files, and in the paper. In the published training and validation
# files all rows say hotpot_qa, whichever of the eight datasets they come from.
UNNAMED = "mixed"
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
    "hotpotqa/hotpot_qa": UNNAMED,
}
MATH_DATASETS = ("gsm8k", "dapo", "mathqa")
TEXT_DATASETS = ("booksum", "writingprompts", "xsum")

DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'


def load_questions(
    path: Path | str, *, question_field: str = "question", answer_field: str = ""
) -> list[Question]:
    """The questions of a file, as `read_questions` reads them.

    Raises UsageError with the file, the row (from 1) and the reason.
    """
    return all_questions(path, read_questions(path, question_field=question_field, answer_field=answer_field))


def all_questions(source: Path | str, numbered: Iterable[tuple[int, Question | BadRow]]) -> list[Question]:
    """The questions of a source. Raises UsageError for a row without one, and if there is none."""
    questions = []
    for number, question in numbered:
        if isinstance(question, BadRow):
            raise UsageError(f"{source}, row {number}: {question}")
        questions.append(question)
    if not questions:
        raise UsageError(f"{source}: there are no questions in it")
    return questions


def read_questions(
    path: Path | str, *, question_field: str = "question", answer_field: str = ""
) -> Iterator[tuple[int, Question | BadRow]]:
    """The number of each row, from 1, with its question or the reason why it has none.

    A row has `question` and `answers` (or `golden_answers`, or `answer`) unless other fields are given, and
    may have `id`, `dataset` (or `data_source`) and `kind`; or it has the columns of the published files.
    Other fields are `extra`; published files have them in the column `extra_info`. A repeated question
    without an id gets its row number appended to its id. Raises UsageError if the file as a whole cannot be
    read.
    """
    path = Path(path)
    return as_questions(
        read_rows(path),
        path.stem,
        question_field=question_field,
        answer_field=answer_field,
        columnar=path.suffix == ".parquet",
    )


def as_questions(
    rows: Iterable[tuple[int, Fields | BadRow]],
    source: str,
    *,
    question_field: str,
    answer_field: str,
    columnar: bool,
) -> Iterator[tuple[int, Question | BadRow]]:
    """The numbered rows of a file or dataset as questions; `source` names the dataset of rows without one.

    `columnar`: rows may share one long text, as in parquet files.
    """
    rows_by_id: dict[str, int] = {}
    for number, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            if "prompt" in row and question_field not in row:
                question = _published_question(row)
            else:
                question = _question(row, source, question_field, answer_field)
                if columnar:
                    _check_lengths(question.extra)
            if question.id in rows_by_id and "id" in row:
                raise BadRow(f"row {rows_by_id[question.id]} already has the id {question.id!r}")
        except BadRow as reason:
            yield number, reason
            continue
        if question.id in rows_by_id:
            question = replace(question, id=f"{question.id}-{number}")
        rows_by_id[question.id] = number
        yield number, question


def _question(row: Fields, file: str, question_field: str, answer_field: str) -> Question:
    names = [answer_field] if answer_field else [name for name in ANSWER_FIELDS if name in row]
    for name in (question_field, *(names or ANSWER_FIELDS[:1])):
        if name not in row:
            there = ", ".join(map(repr, list(row)[:20])) or "none"
            raise BadRow(f"the field {name} is missing (there are: {there}); {OWN_NAMES}")
    text = text_field(row, question_field)
    dataset = file
    if "dataset" in row:
        dataset = text_field(row, "dataset")
    elif "data_source" in row:
        dataset = paper_name(text_field(row, "data_source"))
    kind = cast(Kind, row.get("kind", kind_of(dataset)))
    if kind not in get_args(Kind):
        raise BadRow(f"kind is {kind!r}; choose one of {', '.join(get_args(Kind))}")
    return Question(
        id=text_or_number(row["id"], "id") if "id" in row else id_from_text(text),
        dataset=dataset,
        text=text,
        answers=gold_answers(row[names[0]], names[0]),
        kind=kind,
        extra={
            name: row[name] for name in row if name and name not in (*COLUMNS, question_field, answer_field)
        },
    )


def _check_lengths(extra: Fields) -> None:
    """Raise BadRow for a text that is too long: a small parquet file may share one between all its rows."""
    for name, value in extra.items():
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise BadRow(f"the field {name} has {len(value):,} characters, more than {LONGEST_TEXT:,}")


def _published_question(row: Fields) -> Question:
    """The question of a row with data_source, prompt[{content, role}] and reward_model{ground_truth[]}."""
    prompt, reward_model = row["prompt"], row.get("reward_model")
    if not isinstance(prompt, list) or len(prompt) != 1 or not isinstance(prompt[0], dict):
        raise BadRow("the column prompt must contain one message, as in the published files")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise BadRow("the column reward_model must contain ground_truth, as in the published files")
    content = text_field(prompt[0], "content")
    end = content.rfind(INSTRUCTION_START)
    if not content.startswith(QUESTION_MARK) or end < 0:
        raise BadRow(f"the prompt must be {QUESTION_MARK!r}, the question and the published instruction")
    text = text_or_number(content[len(QUESTION_MARK) : end], "question")
    dataset = paper_name(text_field(row, "data_source"))
    answers = gold_answers(reward_model["ground_truth"], "ground_truth")
    extra = row.get(EXTRA)
    if not isinstance(extra, dict):
        extra = json_object(extra) if isinstance(extra, str) else {}
    return Question(id_from_text(text), dataset, text, answers, kind_of(dataset), extra)


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Write a .jsonl file, or a .parquet file with the published columns, which have no ids.

    Both keep `extra`. The file appears under its name only when it is complete. Raises UsageError.
    """
    check_writable(path)
    if not questions:
        raise UsageError(f"{path}: there are no questions to write")
    content = _as_json_lines(questions) if path.suffix == ".jsonl" else _as_parquet(questions)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None


def check_writable(path: Path) -> None:
    """Raise UsageError if `write_questions` does not support the suffix. Call it before long work."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"{path}: only .jsonl and .parquet files can be written")


def _as_json_lines(questions: Sequence[Question]) -> bytes:
    lines = []
    for question in questions:
        row: dict[str, object] = {
            **question.extra,
            "id": question.id,
            "dataset": question.dataset,
            "question": question.text,
            "answers": question.answers,
        }
        if question.kind != kind_of(question.dataset):
            row["kind"] = question.kind
        # A column of a table may hold dates or bytes.
        lines.append(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
    return b"".join(lines)


def _as_parquet(questions: Sequence[Question]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, object]] = [
        {
            "data_source": question.dataset,
            "prompt": [{"content": f"{QUESTION_MARK}{question.text}\n{PAPER_INSTRUCTION}", "role": "user"}],
            "ability": "multihop_qa",  # the published files have this value for every dataset
            "reward_model": {"ground_truth": list(question.answers), "style": "rule"},
        }
        for question in questions
    ]
    if any(question.extra for question in questions):
        # As JSON: the columns of several files may have one name and other types.
        for row, question in zip(rows, questions, strict=True):
            row[EXTRA] = json.dumps(dict(question.extra), ensure_ascii=False, default=str)
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue().to_pybytes()


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
