"""Read and write question files: JSON lines, and parquet files with the columns that the authors published.

A row that cannot be used is an error that names the row. Rows are never skipped silently.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, get_args

from prompt_r1.data.fields import (
    BadRow,
    checked_text,
    describe,
    gold_answers,
    id_from_text,
    kind_of,
    paper_name,
    text_field,
    text_or_number,
)
from prompt_r1.data.unnamed import UNNAMED, with_inferred_datasets
from prompt_r1.errors import UsageError
from prompt_r1.protocol import PAPER_INSTRUCTION
from prompt_r1.types import Kind, Question

if TYPE_CHECKING:
    from pyarrow import Table

ANSWER_FIELDS = ("answers", "golden_answers", "answer")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TABLES = (".csv", ".tsv", ".json")  # which `convert` turns into question files
QUESTION_MARK = "Question: "
INSTRUCTION_START = "\nFirst, provide a simple explanation of the question"


@dataclass(frozen=True)
class Row:
    """A row of a question file: its number, from 1, and its question or the reason why there is none."""

    number: int
    question: Question | None
    reason: str = ""


def load_questions(path: Path | str) -> list[Question]:
    """The questions of a .jsonl or .parquet file.

    A JSON line has `question` and `answers` (or `golden_answers`, or `answer`), and may have `id`, `dataset`
    (or `data_source`) and `kind`. Raises UsageError with the file, the row (from 1) and the reason.
    """
    questions = []
    for row in read_rows(path):
        if row.question is None:
            raise UsageError(f"{path}, row {row.number}: {row.reason}")
        questions.append(row.question)
    if not questions:
        raise UsageError(f"{path}: the file contains no questions")
    return questions


def read_rows(path: Path | str) -> Iterator[Row]:
    """All rows, good and bad. Raises UsageError if the file as a whole cannot be read.

    The datasets of a published file that does not name them are inferred.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; give a .jsonl or .parquet file of questions")
    if path.suffix == ".jsonl":
        return _with_datasets(_read_json_lines(path))
    if path.suffix == ".parquet":
        return _with_datasets(_read_parquet(path))
    if path.suffix in TABLES:
        raise UsageError(
            f"{path}: convert it first: `python -m prompt_r1.data convert --from questions --in {path} "
            f"--question-field COLUMN --answer-field COLUMN --out {path.with_suffix('.jsonl')}`"
        )
    raise UsageError(
        f"{path}: only .jsonl and .parquet files can be read, and .csv, .tsv and .json converted"
    )


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Write a .jsonl file, or a .parquet file with the published columns, which have no ids.

    The file appears under its name only when it is complete. Raises UsageError.
    """
    check_writable(path)
    if not questions:
        raise UsageError(f"{path}: there are no questions to write")
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:  # "x" follows no symbolic link
            if path.suffix == ".jsonl":
                _write_json_lines(file, questions)
            else:
                _write_parquet(file, questions)
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None


def check_writable(path: Path) -> None:
    """Raise UsageError if `write_questions` does not support the suffix. Call it before long work."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"{path}: only .jsonl and .parquet files can be written")


def parse_json(line: bytes) -> object:
    """Parse one JSON text. Raises BadRow."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON ({error})") from None


def _read_json_lines(path: Path) -> Iterator[Row]:
    rows_by_id: dict[str, int] = {}
    # Read bytes: only "\n" ends a line, whereas str.splitlines would also split at U+2028 inside a text.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                question = _question_from_json(parse_json(line), default_dataset=path.stem)
                if question.id in rows_by_id:
                    raise BadRow(f"row {rows_by_id[question.id]} already has the id {question.id!r}")
            except BadRow as reason:
                yield Row(number, None, str(reason))
                continue
            rows_by_id[question.id] = number
            yield Row(number, question)


def _read_parquet(path: Path) -> Iterator[Row]:
    """The rows of a published parquet file. A repeated question gets its row number appended to its id."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable parquet file ({str(error)[:120]!r})") from None
    ids: set[str] = set()
    for number in range(1, table.num_rows + 1):
        try:
            question = _question_from_parquet(table.slice(number - 1, 1))
        except BadRow as reason:
            yield Row(number, None, str(reason))
            continue
        if question.id in ids:
            question = replace(question, id=f"{question.id}-{number}")
        ids.add(question.id)
        yield Row(number, question)


def _with_datasets(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, with the datasets that can be inferred for questions without one."""
    rows = list(rows)
    unnamed = {row.number: row.question for row in rows if row.question and _is_unnamed(row.question)}
    inferred = dict(zip(unnamed, with_inferred_datasets(list(unnamed.values())), strict=True))
    for row in rows:
        yield replace(row, question=inferred.get(row.number, row.question))


def _is_unnamed(question: Question) -> bool:
    return question.dataset == UNNAMED and question.kind == kind_of(UNNAMED)


def _question_from_json(row: object, *, default_dataset: str) -> Question:
    if not isinstance(row, dict):
        raise BadRow(f"expected a JSON object, not {describe(row)}")
    text = text_field(row, "question")
    answer_field = next((name for name in ANSWER_FIELDS if name in row), None)
    if answer_field is None:
        raise BadRow(f"one of the fields {', '.join(ANSWER_FIELDS)} is required")
    dataset = default_dataset
    if "dataset" in row:
        dataset = text_field(row, "dataset")
    elif "data_source" in row:
        dataset = paper_name(text_field(row, "data_source"))
    kind = row.get("kind", kind_of(dataset))
    if kind not in get_args(Kind):
        raise BadRow(f"kind is {kind!r}; choose one of {', '.join(get_args(Kind))}")
    return Question(
        id=text_or_number(row["id"], "id") if "id" in row else id_from_text(text),
        dataset=dataset,
        text=text,
        answers=gold_answers(row[answer_field], answer_field),
        kind=kind,
    )


def _question_from_parquet(table: "Table") -> Question:
    """The only row of a table with data_source, prompt[{content, role}] and reward_model{ground_truth[]}."""
    try:
        row = table.to_pylist()[0]
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    prompt, reward_model = row.get("prompt"), row.get("reward_model")
    if not isinstance(prompt, list) or len(prompt) != 1 or not isinstance(prompt[0], dict):
        raise BadRow("the column prompt must contain one message, as in the published files")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise BadRow("the column reward_model must contain ground_truth, as in the published files")
    content = text_field(prompt[0], "content")
    end = content.rfind(INSTRUCTION_START)
    if not content.startswith(QUESTION_MARK) or end < 0:
        raise BadRow(f"the prompt must be {QUESTION_MARK!r}, the question and the published instruction")
    text = checked_text(content[len(QUESTION_MARK) : end], "question")
    dataset = paper_name(text_field(row, "data_source"))
    answers = gold_answers(reward_model["ground_truth"], "ground_truth")
    return Question(id=id_from_text(text), dataset=dataset, text=text, answers=answers, kind=kind_of(dataset))


def _write_json_lines(file: BinaryIO, questions: Sequence[Question]) -> None:
    for question in questions:
        row: dict[str, str | tuple[str, ...]] = {
            "id": question.id,
            "dataset": question.dataset,
            "question": question.text,
            "answers": question.answers,
        }
        if question.kind != kind_of(question.dataset):
            row["kind"] = question.kind
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _write_parquet(file: BinaryIO, questions: Sequence[Question]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("content", pa.string()), ("role", pa.string())])
    reward_model = pa.struct([("ground_truth", pa.list_(pa.string())), ("style", pa.string())])
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(message)),
            ("ability", pa.string()),
            ("reward_model", reward_model),
        ]
    )
    rows = [
        {
            "data_source": question.dataset,
            "prompt": [{"content": f"{QUESTION_MARK}{question.text}\n{PAPER_INSTRUCTION}", "role": "user"}],
            "ability": "multihop_qa",  # the published files have this value for every dataset
            "reward_model": {"ground_truth": list(question.answers), "style": "rule"},
        }
        for question in questions
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
