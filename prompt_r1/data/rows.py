"""Read the rows of a file (JSON lines, JSON, CSV, TSV, parquet, WritingPrompts) or of the Hub."""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from prompt_r1.chat_template import encodable
from prompt_r1.errors import UsageError, first_line
from prompt_r1.settings.agent import HUGGING_FACE_PREFIX

Fields = Mapping[str, Any]
NumberedRows = Iterable[tuple[int, object]]  # Rows with their numbers, from 1.
BATCH = 64  # Parquet rows are decoded in batches of this size, because a row may contain a book.
MAX_CELL_CHARACTERS = 64 * 2**20  # A cell may contain a chapter.
HUB_NAME = re.compile(
    rf"{HUGGING_FACE_PREFIX}(?P<repository>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?:(?P<split>.+)"
)


class BadRow(Exception):
    """Why a row cannot be used. The caller adds the file and the number of the row."""


def read_rows(source: Path | str) -> NumberedRows:
    """The rows of a file, or of hf:ORG/NAME:SPLIT, with their numbers from 1.

    The rows of a .jsonl file are numbered by line; a table's header has no number. Raises UsageError with the
    file, the row and the reason: when it is called, or while the rows are read.
    """
    if str(source).startswith(HUGGING_FACE_PREFIX):
        return enumerate(_hub_rows(str(source)), start=1)
    path = Path(source)
    if not path.exists():
        # The text of `source`, because `path` would show https://x as https:/x.
        raise UsageError(f"{source}: there is no such file")
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise UsageError(f"{path}: not a file of rows; give one that ends in {', '.join(READERS)}")
    return read(path)


def _read_text(path: Path) -> str:
    """The text of a file, without a byte order mark. Raises UsageError if it is not UTF-8."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: the file is not UTF-8: save it as UTF-8") from None


def _json_lines(path: Path) -> NumberedRows:
    """The rows of a .jsonl file. Blank lines have a number, but are no rows."""
    # Only "\n" ends a line. str.splitlines would also split at U+2028 inside a text.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, _json_value(line, f"{path}, row {number}")


def _json(path: Path) -> NumberedRows:
    """The rows of a JSON file: a list, or a single row."""
    value = _json_value(_read_text(path), str(path))
    rows = value if isinstance(value, list) else [value]
    return enumerate(rows, start=1)


def _json_value(text: str, where: str) -> object:
    """The value of a JSON text. Raises UsageError, whose text begins with `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        beginning = text.lstrip()[:40]
        raise UsageError(
            f"{where}: not JSON ({error}), it begins with {beginning!r}: write one object in each line "
            "(.jsonl), or all in one list (.json)"
        ) from None


def _table(path: Path) -> NumberedRows:
    """The rows of a CSV or TSV file, whose cells are texts. Blank lines are no rows."""
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    lines = StringIO(_read_text(path), newline="")
    rows = csv.DictReader(lines, delimiter=separator, strict=True, skipinitialspace=True)
    number = 0  # the number of the last row
    try:
        columns = rows.fieldnames or []
        for number, row in enumerate(rows, start=1):
            # DictReader gives surplus cells the name None, and a missing cell the value None.
            if None in row or None in row.values():
                names = ", ".join(columns)[:80]
                raise UsageError(
                    f"{path}, row {number}: more or fewer cells than the {len(columns)} columns ({names}): a "
                    "text with the separator or line breaks in it needs double quotes at both ends"
                )
            yield number, row
    except csv.Error as error:
        raise UsageError(
            f"{path}, row {number + 1}: not readable ({error}): put quotes at both ends of a text, and "
            "write each quote inside the text twice"
        ) from None


def _parquet(path: Path) -> NumberedRows:
    try:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=BATCH)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except Exception as error:  # pyarrow's own errors, or a value that Python has no type for
        raise UsageError(f"{path}: not readable as parquet ({first_line(error)})") from None


def _hub_rows(name: str) -> Iterator[object]:
    """The rows of a dataset of the Hub; SPLIT may be a part, such as train[:1000].

    The dataset is downloaded once into the cache of `datasets`, which executes no code that comes with it.
    """
    found = HUB_NAME.fullmatch(name)
    if not found:
        raise UsageError(
            f"{name}: as questions, hf: names a dataset of the Hub, hf:ORG/NAME:SPLIT or "
            "hf:ORG/NAME/CONFIG:SPLIT; a question file on this machine is given by its path"
        )
    try:
        from datasets import load_dataset

        table = load_dataset(found["repository"], found["config"], split=found["split"])
    except ImportError:
        raise UsageError(f"{name}: datasets of the Hub need a package: pip install datasets") from None
    except Exception as error:  # errors of the files, of `datasets`, or of the Hub's client
        raise UsageError(
            f"{name} could not be loaded from the Hub ({first_line(error)}): check the name, and HF_TOKEN if "
            "it is private, or give a FILE"
        ) from error
    # The rows are read as Arrow, so that images and sounds among the columns are not decoded.
    for batch in table.with_format("arrow").iter(batch_size=BATCH):
        yield from batch.to_pylist()


def _prompts_and_stories(path: Path) -> NumberedRows:
    """The rows of WritingPrompts: line n of X.wp_source is the prompt, line n of X.wp_target its story."""
    stories_path = path.with_suffix(".wp_target")
    if not stories_path.is_file():
        raise UsageError(f"{path}: its stories are missing, which belong in {stories_path}")
    prompts = _read_text(path).strip("\n").split("\n")
    stories = _read_text(stories_path).strip("\n").split("\n")
    if len(prompts) != len(stories):
        raise UsageError(f"{path} and {stories_path.name} have different numbers of lines")
    for number, (prompt, story) in enumerate(zip(prompts, stories, strict=True), start=1):
        yield number, {"prompt": prompt, "story": story}


READERS: dict[str, Callable[[Path], NumberedRows]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
    ".wp_source": _prompts_and_stories,
}


def fields_of(row: object) -> Fields:
    """The fields of a row. Raises BadRow if the row is no object."""
    if not isinstance(row, Mapping):
        raise BadRow(f"expected a JSON object, not {describe(row)}")
    return row


def text_field(row: Fields, field: str, *, may_be_blank: bool = False) -> str:
    """The text of a field. Raises BadRow if it is missing, is not a text, or is blank but must not be."""
    if field not in row:
        raise BadRow(f"the field {field} is missing")
    return text_of(row[field], field, may_be_blank=may_be_blank)


def text_of(value: object, field: str, *, may_be_blank: bool = False) -> str:
    """The text that is the value of a field. Raises BadRow if it is not a text, or is blank but must not be.

    JSON may hold half a character (a lone surrogate), which becomes "?".
    """
    if not isinstance(value, str):
        raise BadRow(f"the field {field} must be a text, not {describe(value)}")
    if not value.strip() and not may_be_blank:
        raise BadRow(f"the field {field} contains an empty text")
    return encodable(value)


def text_or_number(value: object, field: str) -> str:
    """A text that is not blank, or a number; 1945.0 is 1945. Raises BadRow for anything else."""
    if isinstance(value, str):
        return text_of(value, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise BadRow(f"the field {field} must contain texts or numbers, not {describe(value)}")
    return str(int(value)) if value == int(value) else repr(float(value))


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
    """The items of a JSON list in a cell, or the whole text if it is no list.

    A list begins with a bracket and a quote, or it is empty. An interval, such as [0, 1), is no list. Raises
    BadRow for a list of another form, such as Python's ['Paris'].
    """
    if not re.match(r"""\s*\[\s*["'\]]""", text):
        return [text]
    try:
        items: list[object] = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(
            f"the field {field} holds a list that is not JSON, {text[:40]!r}: write it as "
            '["Paris", "City of Paris"]'
        ) from None
    return items


def describe(value: object) -> str:
    """The type and the beginning of a value, for error messages."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
