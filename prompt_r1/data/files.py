"""Files of questions: JSON lines, and the parquet files that the paper's authors published; read and written.

A row that cannot be used is an error that names it: nothing is skipped, and nothing is trained on silently.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from prompt_r1.data.fields import (
    BadRow,
    checked,
    digest,
    gold_of,
    golds_of,
    kind_of,
    name_of,
    paper_name,
    text_of,
)
from prompt_r1.errors import UsageError
from prompt_r1.protocol import PAPER_INSTRUCTION
from prompt_r1.types import Kind, Question

if TYPE_CHECKING:
    from pyarrow import Table

ANSWER_FIELDS = ("answers", "golden_answers", "answer")
QUESTION_MARK = "Question: "
INSTRUCTION_START = "\nFirst, provide a simple explanation of the question"


@dataclass(frozen=True)
class Row:
    """A row of a file: its number from 1, and its question, or the reason why there is none."""

    number: int
    question: Question | None
    reason: str = ""


def load_questions(path: Path | str) -> list[Question]:
    """The questions of a .jsonl or .parquet file.

    A JSON line has `question` and `answers` (or `golden_answers`, or `answer`), and may have `id`, `dataset`
    (or `data_source`) and `kind`. Raises UsageError naming file, row (from 1) and reason.
    """
    questions = []
    for row in read_rows(path):
        if row.question is None:
            raise UsageError(f"{path}, row {row.number}: {row.reason}")
        questions.append(row.question)
    if not questions:
        raise UsageError(f"{path}: the file holds no questions")
    return questions


def read_rows(path: Path | str) -> Iterator[Row]:
    """All rows, good and bad. Raises UsageError for a file that cannot be read at all."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; give a .jsonl or .parquet file of questions")
    if path.suffix == ".jsonl":
        return _read_json_lines(path)
    if path.suffix == ".parquet":
        return _read_published(path)
    raise UsageError(f"{path}: only files ending in .jsonl or .parquet can be read; "
                     "`python -m prompt_r1.data convert` makes them from others")  # fmt: skip


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """A .jsonl file, or a .parquet file with the columns of the published ones (which hold no ids)."""
    check_writable(path)
    if not questions:
        raise UsageError(f"{path}: there is no question to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        (_write_json_lines if path.suffix == ".jsonl" else _write_published)(partial, questions)
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None


def check_writable(path: Path) -> None:
    """Raises UsageError if `write_questions` knows no such format; to be asked before long work."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"{path}: only files ending in .jsonl or .parquet can be written")


def _read_json_lines(path: Path) -> Iterator[Row]:
    rows_by_id: dict[str, int] = {}
    with path.open(
        "rb"
    ) as lines:  # only "\n" ends a line: str.splitlines would also cut at U+2028 inside a text
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                question = _question_of(parse_json(line), default_dataset=path.stem)
                if question.id in rows_by_id:
                    raise BadRow(f"the id {question.id!r} is that of row {rows_by_id[question.id]} already")
            except BadRow as reason:
                yield Row(number, None, str(reason))
                continue
            rows_by_id[question.id] = number
            yield Row(number, question)


def _read_published(path: Path) -> Iterator[Row]:
    """A parquet file as published. Some prompts occur twice there: the later one's id gets its row number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable parquet file ({str(error)[:120]!r})") from None
    ids: set[str] = set()
    for number in range(1, table.num_rows + 1):
        try:
            question = _published_question(table.slice(number - 1, 1))
        except BadRow as reason:
            yield Row(number, None, str(reason))
            continue
        if question.id in ids:
            question = replace(question, id=f"{question.id}-{number}")
        ids.add(question.id)
        yield Row(number, question)


def parse_json(line: bytes) -> object:
    """One JSON text. Raises BadRow."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON ({error})") from None


def _question_of(row: object, *, default_dataset: str) -> Question:
    if not isinstance(row, dict):
        raise BadRow(f"a JSON object is wanted, not {name_of(row)}")
    text = text_of(row, "question")
    field = next((name for name in ANSWER_FIELDS if name in row), None)
    if field is None:
        raise BadRow(f"one of the fields {', '.join(ANSWER_FIELDS)} is wanted")
    dataset = default_dataset
    if "dataset" in row:
        dataset = text_of(row, "dataset")
    elif "data_source" in row:
        dataset = paper_name(text_of(row, "data_source"))
    kind = row.get("kind", kind_of(dataset))
    if kind not in get_args(Kind):
        raise BadRow(f"kind is {kind!r}; choose one of {', '.join(get_args(Kind))}")
    name = gold_of(row["id"], "id") if "id" in row else digest(text)
    return Question(id=name, dataset=dataset, text=text, answers=golds_of(row[field], field), kind=kind)


def _published_question(table: "Table") -> Question:
    """The only row of a table with data_source, prompt[{content, role}] and reward_model{ground_truth[]}."""
    try:
        row = table.to_pylist()[0]
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    prompt, reward_model = row.get("prompt"), row.get("reward_model")
    if not isinstance(prompt, list) or len(prompt) != 1 or not isinstance(prompt[0], dict):
        raise BadRow("the column prompt must hold one message, as in the published files")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise BadRow("the column reward_model must hold ground_truth, as in the published files")
    content = text_of(prompt[0], "content")
    end = content.rfind(INSTRUCTION_START)
    if not content.startswith(QUESTION_MARK) or end < 0:
        raise BadRow(f"the prompt must be {QUESTION_MARK!r}, the question and the published instruction")
    text = checked(content[len(QUESTION_MARK) : end], "question")
    dataset = paper_name(text_of(row, "data_source"))
    golds = golds_of(reward_model["ground_truth"], "ground_truth")
    return Question(id=digest(text), dataset=dataset, text=text, answers=golds, kind=kind_of(dataset))


def _write_json_lines(path: Path, questions: Sequence[Question]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as lines:
        for question in questions:
            row: dict[str, str | tuple[str, ...]] = {
                "id": question.id, "dataset": question.dataset, "question": question.text,
                "answers": question.answers,
            }  # fmt: skip
            if question.kind != kind_of(question.dataset):
                row["kind"] = question.kind
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_published(path: Path, questions: Sequence[Question]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("content", pa.string()), ("role", pa.string())])
    golds = pa.struct([("ground_truth", pa.list_(pa.string())), ("style", pa.string())])
    schema = pa.schema([("data_source", pa.string()), ("prompt", pa.list_(message)), ("ability", pa.string()),
                        ("reward_model", golds)])  # fmt: skip
    rows = [
        {
            "data_source": question.dataset,
            "prompt": [{"content": f"{QUESTION_MARK}{question.text}\n{PAPER_INSTRUCTION}", "role": "user"}],
            "ability": "multihop_qa",  # as published, whatever is asked
            "reward_model": {"ground_truth": list(question.answers), "style": "rule"},
        }
        for question in questions
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
