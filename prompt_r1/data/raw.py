"""Read the rows of the datasets' raw dumps, one at a time."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from prompt_r1.data.fields import BadRow, Fields
from prompt_r1.data.files import BYTE_ORDER_MARK, parse_json
from prompt_r1.errors import UsageError

WHITE_SPACE = " \t\r\n"


def raw_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Fields]]:
    """(number from 1, fields) of each row of a .json, .jsonl, .parquet, .csv, .tsv or .wp_source file.

    Only `columns` are read from a parquet file, because others may contain whole books. Raises UsageError
    with the file, the row and the reason.
    """
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    number = 1
    try:
        for row in _rows(path, columns):
            if not isinstance(row, dict):
                raise BadRow(f"expected a JSON object, not {type(row).__name__}")
            yield number, row
            number += 1
    except BadRow as reason:
        raise UsageError(f"{path}, row {number}: {reason}") from None


def _rows(path: Path, columns: Sequence[str]) -> Iterator[object]:
    """The rows of a file of any format. The readers raise BadRow for the row that cannot be read."""
    match path.suffix:
        case ".jsonl":
            return _json_lines(path)
        case ".json":
            return _json(path)
        case ".csv":
            return _csv(path, delimiter=",")
        case ".tsv":
            return _csv(path, delimiter="\t")
        case ".parquet":
            return _parquet(path, columns)
        case ".wp_source" | ".wp_target":
            return _prompts_and_stories(path)
    suffixes = ".parquet, .jsonl, .json, .csv, .tsv, .wp_source, .wp_target"
    raise UsageError(f"{path}: not a raw dump; give a file that ends in {suffixes}")


def _json_lines(path: Path) -> Iterator[object]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if number == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield parse_json(line)


def _json(path: Path) -> Iterator[object]:
    """The rows of an array, of an object like SQuAD's or TriviaQA's, or of JSON lines with this suffix."""
    with path.open("rb") as file:
        first_line = file.readline().removeprefix(BYTE_ORDER_MARK).strip()
    if first_line.startswith(b"{"):
        try:
            document = parse_json(path.read_bytes().removeprefix(BYTE_ORDER_MARK))
        except BadRow:  # more than one object
            yield from _json_lines(path)
        else:
            yield from _nested_rows(document)
        return
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte {error.start + 1} of the file)") from None
    yield from _array_elements(text)


def _array_elements(text: str) -> Iterator[object]:
    """The elements of a JSON array, parsed one by one: all at once, some dumps would need gigabytes."""
    decoder = json.JSONDecoder()
    position = _skip_white_space(text, 0)
    if text[position : position + 1] != "[":
        raise BadRow("expected a JSON array of objects")
    position = _skip_white_space(text, position + 1)
    while text[position : position + 1] != "]":
        try:
            element, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"not JSON ({error})") from None
        yield element
        position = _skip_white_space(text, position)
        following = text[position : position + 1]
        if following not in (",", "]"):
            raise BadRow("not JSON (a comma or the end of the array is missing)")
        if following == ",":
            position = _skip_white_space(text, position + 1)


def _skip_white_space(text: str, position: int) -> int:
    while text[position : position + 1] and text[position] in WHITE_SPACE:
        position += 1
    return position


def _nested_rows(document: object) -> Iterator[object]:
    """The questions inside one JSON object; any object of another layout is one row.

    SQuAD has them in data → paragraphs → qas (each row also gets its context), TriviaQA in Data.
    """
    if not isinstance(document, dict):
        yield document
        return
    articles = document.get("Data", document.get("data"))
    if not isinstance(articles, list):
        yield document
        return
    for article in articles:
        if not isinstance(article, dict) or "paragraphs" not in article:
            yield article
            continue
        try:
            rows = [
                {**question, "context": paragraph["context"]}
                for paragraph in article["paragraphs"]
                for question in paragraph["qas"]
            ]
        except (KeyError, TypeError) as error:
            raise BadRow(f"not in the layout of SQuAD's JSON ({error!r})") from None
        yield from rows


def _csv(path: Path, *, delimiter: str) -> Iterator[object]:
    csv.field_size_limit(sys.maxsize)  # a field may contain a chapter
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield from csv.DictReader(lines, delimiter=delimiter)
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadRow(f"not readable ({error})") from None


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[object]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(batch_size=1_000, columns=present):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadRow(f"not readable as parquet ({str(error)[:120]!r})") from None


def _prompts_and_stories(path: Path) -> Iterator[object]:
    """WritingPrompts: line n of X.wp_source is the prompt of the story in line n of X.wp_target."""
    prompts = path.with_suffix(".wp_source")
    stories = path.with_suffix(".wp_target")
    for file in (prompts, stories):
        if not file.is_file():
            raise UsageError(
                f"{file}: there is no such file; {prompts.name} and {stories.name} are both needed"
            )
    with prompts.open("rb") as prompt_lines, stories.open("rb") as story_lines:
        for prompt, story in zip_longest(prompt_lines, story_lines):
            if prompt is None or story is None:
                raise BadRow(f"{prompts.name} and {stories.name} have different numbers of lines")
            try:
                yield {"prompt": prompt.decode("utf-8"), "story": story.decode("utf-8")}
            except UnicodeDecodeError:
                raise BadRow("not UTF-8") from None
