"""Read and check the rows of data files."""

import csv
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from prompt_r1.errors import UsageError

Fields = Mapping[str, object]
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".wp_source")
LARGEST_ROW = 64 * 2**20  # bytes; a row may hold a book
LONGEST_TEXT = 1_000_000  # characters of a question or an answer: more takes gigabytes to tokenize
PARQUET_ROWS = 64  # decoded at a time: of a text that many rows share, the file has one copy


class BadRow(Exception):
    """A row cannot be used, and why. The caller adds the file and the row number."""


def read_rows(path: Path, columns: Collection[str] = ()) -> Iterator[tuple[int, Fields | BadRow]]:
    """The number of each row, from 1, with its fields or the reason why it cannot be read.

    Of a parquet file only `columns` (none: all) are read, because those of a dump may contain whole books.
    Raises UsageError if there is no such file, or none of a known format.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name the files in it")
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    number = 0
    try:
        for number, row in _numbered_rows(path, columns):
            if not isinstance(row, dict | BadRow):
                row = BadRow(f"expected a JSON object, not {describe(row)}")
            yield number, row
    except BadRow as reason:  # the rest of the file cannot be read either
        yield number + 1, reason


def _numbered_rows(path: Path, columns: Collection[str]) -> Iterable[tuple[int, object]]:
    match path.suffix:
        case ".jsonl":
            return _json_lines(path)
        case ".json":
            return _json(path)
        case ".csv" | ".tsv":
            return enumerate(_csv(path), start=1)
        case ".parquet":
            return enumerate(_parquet(path, columns), start=1)
        case ".wp_source":
            return enumerate(_prompts_and_stories(path), start=1)
    raise UsageError(f"{path}: not a file of rows; give one that ends in {', '.join(SUFFIXES)}")


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    # Read bytes: only "\n" ends a line, whereas str.splitlines would also split at U+2028 inside a text.
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LARGEST_ROW + 1), b""), start=1):
            if not line.strip():
                continue
            if len(line) > LARGEST_ROW:
                raise BadRow(f"the line has over {LARGEST_ROW:,} bytes")
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield number, BadRow(f"not UTF-8 (byte {error.start + 1} of the line)")
            except (ValueError, RecursionError) as error:
                yield number, BadRow(f"not JSON ({error})")


def _json(path: Path) -> Iterable[tuple[int, object]]:
    """The rows of an array, of a single object, or of JSON lines with this suffix."""
    content = path.read_bytes()
    try:
        document = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if content.lstrip().startswith(b"["):
            raise BadRow(f"not JSON ({error})") from None
        return _json_lines(path)
    return enumerate(document if isinstance(document, list) else [document], start=1)


def _csv(path: Path) -> Iterator[object]:
    csv.field_size_limit(LARGEST_ROW)  # a field may contain a chapter
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield from csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadRow(f"not readable ({error})") from None


def _parquet(path: Path, columns: Collection[str]) -> Iterator[object]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            present = [name for name in names if name in columns]
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=present or names):
                yield from batch.to_pylist()
    # Dates out of range are ValueErrors or OverflowErrors, unknown time zones KeyErrors.
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        raise BadRow(f"not readable as parquet ({str(error)[:120]!r})") from None


def _prompts_and_stories(path: Path) -> Iterator[object]:
    """WritingPrompts: line n of X.wp_source is the prompt of the story in line n of X.wp_target."""
    stories = path.with_suffix(".wp_target")
    if not stories.is_file():
        raise UsageError(f"{stories}: there is no such file; {path.name} has the prompts of its stories")
    with path.open("rb") as prompt_lines, stories.open("rb") as story_lines:
        for prompt, story in zip_longest(prompt_lines, story_lines):
            if prompt is None or story is None:
                raise BadRow(f"{path.name} and {stories.name} have different numbers of lines")
            try:
                yield {"prompt": prompt.decode("utf-8"), "story": story.decode("utf-8")}
            except UnicodeDecodeError:
                raise BadRow("not UTF-8") from None


def text_field(row: Fields, field: str) -> str:
    """The text of a field. Raises BadRow if it is missing, blank or not a text."""
    if field not in row:
        raise BadRow(f"the field {field} is missing")
    value = row[field]
    if not isinstance(value, str):
        raise BadRow(f"the field {field} must be a text, not {describe(value)}")
    return text_or_number(value, field)


def text_or_number(value: object, field: str) -> str:
    """A text that is not blank, or a number as text. Raises BadRow for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise BadRow(f"the field {field} must contain texts or numbers, not {describe(value)}")
    if len(value) > LONGEST_TEXT:
        raise BadRow(f"the field {field} has {len(value):,} characters, more than {LONGEST_TEXT:,}")
    if not value.strip():
        raise BadRow(f"the field {field} contains an empty text")
    if re.search("[\ud800-\udfff]", value):
        raise BadRow(f"the field {field} contains half a character (a lone surrogate)")
    return value


def gold_answers(value: object, field: str) -> tuple[str, ...]:
    """The gold answers in a field, which holds one or a list of them. Raises BadRow if one is blank."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise BadRow(f"the field {field} has no gold answer")
    return tuple(text_or_number(gold, field) for gold in values)


def describe(value: object) -> str:
    """The type and the beginning of a value, for error messages."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
