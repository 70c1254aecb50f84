"""The datasets' raw dumps, as they are shipped → numbered rows, one at a time."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from prompt_r1.data.fields import BadRow
from prompt_r1.data.files import parse_json
from prompt_r1.errors import UsageError

Fields = dict[str, object]
BLANKS = " \t\r\n"


def raw_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Fields]]:
    """(number from 1, fields) of each row of a .json, .jsonl, .parquet, .csv, .tsv or .wp_source file.

    Of a parquet file only `columns` are read: some hold whole books. Raises UsageError naming file and row.
    """
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv,
               ".wp_source": _prompts_and_stories, ".wp_target": _prompts_and_stories}  # fmt: skip
    if path.suffix == ".parquet":
        rows = _parquet(path, columns)
    elif path.suffix in readers:
        rows = readers[path.suffix](path)
    else:
        raise UsageError(f"{path}: no raw dump; give one that ends in .parquet, {', '.join(readers)}")
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise BadRow(f"a JSON object is wanted, not {type(row).__name__}")
            yield number, row
    except BadRow as reason:
        raise UsageError(f"{path}, row {number + isinstance(reason, UnreadRow)}: {reason}") from None


class UnreadRow(BadRow):
    """The row after the last one that was read cannot be read."""


def _json_lines(path: Path) -> Iterator[object]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            if line.strip():
                yield _parsed(line)


def _parsed(line: bytes) -> object:
    try:
        return parse_json(line)
    except BadRow as reason:
        raise UnreadRow(str(reason)) from None


def _json(path: Path) -> Iterator[object]:
    """An array; SQuAD's or TriviaQA's object with all questions inside; or JSON lines under this suffix."""
    with path.open("rb") as file:
        first = file.readline().removeprefix(b"\xef\xbb\xbf").strip()
    if first.startswith(b"{"):
        try:
            whole = parse_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        except BadRow:  # more than one object
            yield from _json_lines(path)
        else:
            yield from _nested(whole)
        return
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadRow(f"not UTF-8 (byte {error.start + 1} of the file)") from None
    yield from _elements(text)


def _elements(text: str) -> Iterator[object]:
    """The elements of a JSON array, parsed one by one: the whole of some would need gigabytes."""
    decoder = json.JSONDecoder()
    position = _skip(text, 0)
    if text[position : position + 1] != "[":
        raise UnreadRow("a JSON array of objects is wanted")
    position = _skip(text, position + 1)
    while text[position : position + 1] != "]":
        try:
            element, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise UnreadRow(f"not JSON ({error})") from None
        yield element
        position = _skip(text, position)
        if text[position : position + 1] not in (",", "]"):
            raise UnreadRow("not JSON (a comma or the array's end is missing)")
        position = _skip(text, position + (text[position] == ","))


def _skip(text: str, position: int) -> int:
    while text[position : position + 1] and text[position] in BLANKS:
        position += 1
    return position


def _nested(whole: object) -> Iterator[object]:
    """SQuAD: data → paragraphs → qas, each with its context. TriviaQA: Data. Any other object: one row."""
    if not isinstance(whole, dict) or not isinstance(articles := whole.get("Data", whole.get("data")), list):
        yield whole
        return
    for article in articles:
        if not isinstance(article, dict) or "paragraphs" not in article:
            yield article
            continue
        try:
            yield from [
                {**qa, "context": part["context"]} for part in article["paragraphs"] for qa in part["qas"]
            ]
        except (KeyError, TypeError) as error:
            raise UnreadRow(f"not laid out as SQuAD's JSON ({error!r})") from None


def _csv(path: Path) -> Iterator[object]:
    csv.field_size_limit(sys.maxsize)  # a field may be a chapter
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield from csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
    except (csv.Error, UnicodeDecodeError) as error:
        raise UnreadRow(f"not readable ({error})") from None


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[object]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(batch_size=1_000, columns=wanted):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadRow(f"not readable as parquet ({str(error)[:120]!r})") from None


def _prompts_and_stories(path: Path) -> Iterator[object]:
    """WritingPrompts: line n of X.wp_source is the prompt of line n of X.wp_target."""
    stories = path.with_suffix(".wp_target")
    prompts = path.with_suffix(".wp_source")
    for part in (prompts, stories):
        if not part.is_file():
            raise UsageError(f"{part}: there is no such file, but the other one of the pair")
    with prompts.open("rb") as sources, stories.open("rb") as targets:
        for prompt, story in zip_longest(sources, targets):
            if prompt is None or story is None:
                raise UnreadRow(f"{prompts.name} and {stories.name} have different numbers of lines")
            try:
                yield {"prompt": prompt.decode("utf-8"), "story": story.decode("utf-8")}
            except UnicodeDecodeError:
                raise UnreadRow("not UTF-8") from None
