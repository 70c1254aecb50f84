"""Read and write question files.

A reader refuses what it would have to guess: a surplus cell, a list written as text, a whole solution.
"""

import csv
import hashlib
import json
import math
import re
from codecs import iterdecode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any, cast, get_args

from prompt_r1.errors import UsageError, first_line
from prompt_r1.programs.command_line import command
from prompt_r1.programs.files import LFS_ADVICE, LFS_POINTER
from prompt_r1.types import Kind, Question

Fields = Mapping[str, Any]
BOM = b"\xef\xbb\xbf"
PARQUET_ROWS = 64  # decoded at a time: a row may contain a book
BLANK = object()  # in place of a row: a blank line, which has a number too

ANSWER_FIELDS = ("answers", "golden_answers", "answer")
COLUMNS = ("question", *ANSWER_FIELDS, "id", "dataset", "data_source", "kind")
BY_LETTERS = {column.replace("_", ""): column for column in COLUMNS if column != "id"}
CONVERTER = "`python -m prompt_r1.data convert` reads the raw files of the datasets"
LIST_OF_TEXTS = re.compile(r"""^\s*[({]\s*["']|\[\s*["']""")  # ['a' 'b'], ("a", "b"), array(['a'])
LIST_OR_PIPE = re.compile(r"^\s*\[|\S\s*(\|)\s*\S")  # ordinary in mathematics: [0, 1), |x|
# Numbers and days as programs write them: 1945.0, 1.9E+05, 2020-01-02 00:00:00, 1/2/2020 0:00.
SPREADSHEET = re.compile(r"\s*([-+]?\d+(\.0+|(\.\d+)?[eE][+-]\d+)|[\d./-]{6,10}[ T]0?0:00[.0Z+:]*)\s*")
MISSING = re.compile(r"\s*(-?inf|nan|NaN|NaT|None|null|NULL|<NA>|#?N/A|#[A-Z/0]+[!?])\s*")
LABEL = re.compile(r"\s*\(?([A-Za-z]|\d+)([.):](\s.*)?|(, ?[A-Za-z])+)?\s*")  # of a choice, or with its text
# GSM8K's calculator and mark of the answer, LaTeX's boxes around it, and tags.
SOLUTION = re.compile(r"####|<<[^<>\n]*=[^<>\n]*>>|\\(boxed|fbox)\b|</think>|<answer>")
# Columns that only the raw rows of a dataset have.
RAW_COLUMNS = {
    "popqa": ("possible_answers",),
    "mathqa": ("Problem", "options"),
    "booksum": ("summary_text",),
    "writingprompts": ("prompt", "story"),
    "xsum": ("document", "summary"),
    "dapo": ("prompt", "solution"),
}
HUB_NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?:(?P<split>.+)")

# Names of the datasets in the published files, and in the paper. In the published training and validation
# files all rows say hotpot_qa, whichever of the eight datasets they come from.
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
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("gsm8k", "dapo", "dapomath", "dapomath17k", "math", "math500", "mathqa"), "math"),
    **dict.fromkeys(("booksum", "writingprompts", "xsum"), "text"),
}
# How files begin that are not what their names say.
OTHER_FILES = {
    LFS_POINTER: LFS_ADVICE,
    **dict.fromkeys((b"<!", b"<html", b"<?xml"), "a web page or XML: download the file itself"),
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"), "compressed: unpack it"),
    b"PK\x03\x04": "a zip archive or an Excel file: unpack it, or save the table as CSV",
    b"PAR1": "a parquet file: name it .parquet",
}
PUBLISHED = re.compile(r"\AQuestion: (.*)\nFirst, provide a simple explanation of the question", re.DOTALL)
DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'


class BadRow(Exception):
    """A row cannot be used, and why. The caller adds the file and the row number."""


def load_questions(path: Path | str) -> list[Question]:
    """The questions of a file, or of hf:ORG/NAME:SPLIT. Raises UsageError with row (from 1) and reason.

    For a raw row of a dataset the reason is the command that converts it.
    """
    hub = HUB_NAME.fullmatch(str(path))
    dataset = hub["repository"].partition("/")[2] if hub else Path(path).stem

    def rows() -> Iterator[tuple[int, object]]:
        for number, row in read_rows(path):
            if isinstance(row, Mapping) and (name := _raw_dataset(row)):
                out = re.sub(r"[^\w-]+", "-", f"{Path(path).stem}-{name}") + ".jsonl"
                convert = command("-m prompt_r1.data", "convert", "--from", name, "--in", path, "--out", out)
                raise UsageError(f"{path}, row {number}: a raw row of {name}: `{convert}` converts such rows")
            yield number, row

    return as_questions(path, rows(), dataset=dataset)


def _raw_dataset(row: Fields) -> str:
    """The dataset, as `convert` calls it, whose raw layout a row has; "" for another row."""
    answer, answers = row.get("answer", row.get("Answer")), row.get("answers")
    if "answer_aliases" in row:
        return "musique"
    span = answers[0] if isinstance(answers, list) and answers else answers
    if isinstance(row.get("question"), str) and ("is_impossible" in row or _has(span, "text")):
        return "squad"
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return "dapo" if str(prompt[0].get("content")).startswith(DAPO_OPENING) else ""
    if _has(answer, "value") or _has(answer, "Value"):
        return "triviaqa"
    if isinstance(answer, str) and "####" in answer:
        return "gsm8k"
    if "question" in row and any(name in row for name in ANSWER_FIELDS):
        return ""
    return next((name for name, columns in RAW_COLUMNS.items() if row.keys() >= {*columns}), "")


def _has(value: object, field: str) -> bool:
    return isinstance(value, Mapping) and field in value


def as_questions(source: str | Path, rows: Iterable[tuple[int, object]], *, dataset: str) -> list[Question]:
    """The questions of numbered rows; `dataset` is the name for rows without one.

    A row has `question` and `answers` (or `golden_answers`, or `answer`), and may have `id`, `dataset` (or
    `data_source`) and `kind`; other fields are `extra`. Or it has the columns of the published files. A
    repeated question without an id gets its row number appended to its id. Raises UsageError.
    """
    questions: dict[str, Question] = {}
    for number, row in rows:
        try:
            fields = fields_of(row)
            published = "reward_model" in fields and "question" not in fields
            question = _published_question(fields) if published else _question(fields, dataset)
            if question.id in questions and "id" in fields:
                raise BadRow(f"another row has the id {question.id!r} too")
        except BadRow as reason:
            raise UsageError(f"{source}, row {number}: {reason}") from None
        if question.id in questions:
            question = replace(question, id=f"{question.id}-{number}")
        questions[question.id] = question
    if not questions:
        raise UsageError(f"{source}: there are no questions in it")
    return list(questions.values())


def fields_of(row: object) -> Fields:
    """The fields of a row of `read_rows`. Raises BadRow."""
    if not isinstance(row, Mapping):
        raise BadRow(f"expected a JSON object, not {describe(row)}")
    return row


def _question(row: Fields, dataset: str) -> Question:
    for name in row:
        column = BY_LETTERS.get(re.sub(r"\.\d+$|[\W_]", "", str(name).lower()), name)
        if column != name:
            raise BadRow(f"the field {name!r} differs from {column!r} only in case or signs: rename it")
    answered = [name for name in ANSWER_FIELDS if name in row]
    if "question" not in row or not answered:
        missing = "answers" if "question" in row else "question"
        there = ", ".join(map(repr, list(row)[:20])) or "none"
        raise BadRow(
            f"the field {missing} is missing (there are: {there}): name the columns question and answer; "
            f"{CONVERTER}"
        )
    text = text_field(row, "question")
    if MISSING.fullmatch(text):
        raise BadRow(f"the field question holds {text!r}, as programs write a missing value: remove the row")
    if "dataset" in row:
        dataset = text_field(row, "dataset")
    elif "data_source" in row:
        dataset = paper_name(text_field(row, "data_source"))
    kind = cast(Kind, row.get("kind", kind_of(dataset)))
    if kind not in get_args(Kind):
        raise BadRow(f"kind is {kind!r}; choose one of {', '.join(get_args(Kind))}")
    filled = [name for name in answered if repr(row[name]) not in ("None", "''", "[]")] or answered[:1]
    golds, *others = (gold_answers(row[name], name, kind) for name in filled)
    if any(not {*other} <= {*golds} for other in others):
        raise BadRow(f"the fields {' and '.join(filled)} differ: leave one of them empty")
    value = list(golds) if isinstance(row[filled[0]], str) else row[filled[0]]
    for gold in _parts(value):
        if label := LABEL.fullmatch(str(gold)):
            _check_choice(row, gold, label[1])
    return Question(
        id=text_or_number(row["id"], "id") if "id" in row else id_from_text(text),
        dataset=dataset,
        text=text,
        answers=golds,
        kind=kind,
        extra={name: value for name, value in row.items() if name not in COLUMNS},
    )


def _check_choice(row: Fields, gold: object, label: str) -> None:
    """Raise BadRow for a gold answer that stands for a choice, such as 2, "B" or "B. Paris"."""
    for name, choices in row.items():
        found = re.sub(r"^(choice|option|opt?|answer)?[\s_]?", "", str(name).lower()) == label.lower()
        if name in ("choices", "options") and choices:
            texts = [text for part in _parts(choices) for text in _parts(part)]
            if isinstance(choices, str):  # its words that are not labels, as in "a ) 38 , b ) 27"
                texts = re.findall(r"(?<![\w(])\w+(?!\w|\s*[).:])", choices)
            found = gold not in texts
        if found:
            raise BadRow(f"the answer {gold!r} stands for a choice (field {name}): write the text alone")


def _parts(choices: object) -> Iterable[object]:
    """The items of a list, the values of an object without labels, or the value itself."""
    if isinstance(choices, Mapping):
        return [part for name, part in choices.items() if name not in ("label", "key", "id")]
    return choices if isinstance(choices, list) else [choices]


def _published_question(row: Fields) -> Question:
    """The question of a row with data_source, prompt[{content, role}] and reward_model{ground_truth[]}."""
    try:
        [message], truth = row["prompt"], row["reward_model"]["ground_truth"]
        [text] = PUBLISHED.findall(text_field(message, "content"))
    except (LookupError, TypeError, ValueError):
        raise BadRow(
            "not a row of the published files, with reward_model{ground_truth} and prompt[{content}]: "
            f"'Question: ', the question and the published instruction; {CONVERTER}"
        ) from None
    text = text_or_number(text, "question")
    dataset = paper_name(text_field(row, "data_source"))
    kind = kind_of(dataset)
    return Question(id_from_text(text), dataset, text, gold_answers(truth, "ground_truth", kind), kind)


def read_rows(source: Path | str) -> Iterator[tuple[int, object]]:
    """The rows of a file, or of hf:ORG/NAME:SPLIT, with their numbers, from 1.

    Raises UsageError with file, row and reason.
    """
    if str(source).startswith("hf:"):
        yield from enumerate(_hub_rows(str(source)), start=1)
        return
    path = Path(source)
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name the files in it")
    if not path.exists():
        raise UsageError(f"{path}: there is no such file")
    if not path.is_file():  # a pipe, which could not be read twice
        raise UsageError(f"{path} is a pipe or a device: save its rows in a file, and name that")
    with path.open("rb") as file:
        start = file.read(64).removeprefix(BOM).lstrip().lower()
    suffix = path.suffix.lower()
    for beginning, what in OTHER_FILES.items():
        if start.startswith(beginning.lower()) and not (suffix == ".parquet" and beginning == b"PAR1"):
            raise UsageError(f"{path} is {what}")
    if b"\0" in start and not start.startswith(b"par"):
        raise UsageError(f"{path} is in UTF-16, or not a table: save the file as UTF-8")
    if suffix not in READERS:
        raise UsageError(f"{path}: not a file of rows; give one that ends in {', '.join(READERS)}")
    number = 0
    try:
        for number, row in enumerate(READERS[suffix](path), start=1):
            if row is not BLANK:
                yield number, row
    except BadRow as reason:
        raise UsageError(f"{path}, row {number + 1}: {reason}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}, row {number + 1}: not UTF-8 ({error}): save the file as UTF-8") from None
    except csv.Error as error:
        raise UsageError(
            f"{path}, row {number + 1}: not readable ({error}): put quotes at both ends of a text, and "
            "double those in it"
        ) from None


def _json_lines(path: Path) -> Iterator[object]:
    # Bytes: only "\n" and "\r" end a line, whereas str.splitlines would also split at U+2028 inside a text.
    with path.open("rb") as file:
        for line in (line for part in file for line in part.splitlines()):
            try:
                yield _from_json(line) if line.strip() else BLANK
            except (ValueError, RecursionError) as error:
                raise BadRow(
                    f"not JSON in UTF-8 ({error}): write each row in a line of its own, or all rows as a "
                    "list in a .json file"
                ) from None


def _from_json(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where an object has two fields of one name."""

    def fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(row := dict(pairs)) < len(pairs):
            raise ValueError(f"two fields have one name: {', '.join(name for name, _ in pairs)[:200]}")
        return row

    return json.loads(text.decode("utf-8-sig"), object_pairs_hook=fields)


def _json(path: Path) -> Iterable[object]:
    """The rows of a list, alone or in an object as `data`; one row; or JSON lines."""
    content = path.read_bytes()
    try:
        value = _from_json(content)
    except (ValueError, RecursionError) as error:
        if content.removeprefix(BOM).lstrip().startswith(b"["):
            raise BadRow(f"not JSON in UTF-8 ({error})") from None
        return _json_lines(path)
    if isinstance(value, dict) and "question" not in value:
        lists = [value[name] for name in ("data", "Data", "questions", "examples") if name in value]
        value = lists[0] if len(lists) == 1 else value
    return value if isinstance(value, list) else [value]


def _csv(path: Path) -> Iterator[object]:
    csv.field_size_limit(64 * 2**20)  # a field may contain a chapter
    with path.open("rb") as file:  # decoded line by line: an error is in the row that is read next
        if file.peek().removeprefix(BOM).lstrip().startswith((b"{", b"[")):
            raise BadRow("JSON, not a table: name the file .jsonl, or .json if it is one list")
        lines = (line for text in iterdecode(file, "utf-8") for line in StringIO(text.lstrip("\ufeff"), ""))
        separator, name = ("\t", "tabs") if path.suffix.lower() == ".tsv" else (",", "commas")
        rows = filter(None, csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=True))
        columns = next(rows, [])
        if len(columns) == 1 and (other := re.search(r"[;,|\t]", columns[0])):
            raise BadRow(f"the columns are separated by {other[0]!r}: save the table with {name}")
        if len(set(columns)) < len(columns):
            raise BadRow(f"two columns have one name: {', '.join(columns)}")
        for cells in rows:
            if len(cells) != len(columns):
                raise BadRow(
                    f"cells: {len(cells)}, columns: {len(columns)} ({', '.join(columns)[:80]}): a text with "
                    f"{name} or line breaks needs double quotes at both ends"
                )
            if cells[0].startswith("# ") or cells == columns:
                raise BadRow("a comment line, or the header again: remove it, or the # of the question")
            yield dict(zip(columns, cells, strict=True))


def _parquet(path: Path) -> Iterator[object]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if len(set(columns)) < len(columns):
                raise BadRow(f"two columns have one name: {', '.join(columns)}")
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                yield from batch.to_pylist()
    # Dates out of range are ValueErrors or OverflowErrors, unknown time zones KeyErrors.
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        raise BadRow(f"not readable as parquet ({str(error)[:120]!r}): write the file anew") from None


def _hub_rows(name: str) -> Iterator[object]:
    """The rows of a dataset of the Hub; SPLIT may be a part, such as train[:1000].

    The dataset is downloaded once into the cache of `datasets`, which executes no code that comes with it.
    """
    found = HUB_NAME.fullmatch(name)
    if not found:
        raise UsageError(
            f"{name}: as questions, hf: names a dataset of the Hub, hf:ORG/NAME:SPLIT or "
            "hf:ORG/NAME/CONFIG:SPLIT; give those of this machine as a FILE"
        )
    try:
        from datasets import load_dataset

        table = load_dataset(found["repository"], found["config"], split=found["split"])
    except ImportError:
        raise UsageError(f"{name}: datasets of the Hub need a package: pip install datasets") from None
    except Exception as error:  # of the dataset's files, of datasets, or of the Hub's HTTP client
        raise UsageError(
            f"{name} could not be loaded from the Hub ({first_line(error)}): check the name, and HF_TOKEN if "
            "it is private, or give a FILE"
        ) from error
    # As Arrow: images and sounds among the columns are not decoded.
    for batch in table.with_format("arrow").iter(batch_size=PARQUET_ROWS):
        yield from batch.to_pylist()


def _prompts_and_stories(path: Path) -> Iterable[object]:
    """WritingPrompts: line n of X.wp_source is the prompt of the story in line n of X.wp_target."""
    stories = path.with_suffix(".wp_target")
    if not stories.is_file():
        raise UsageError(f"{path}: its stories are missing, which belong into {stories}")
    # Only "\n" ends a line.
    prompts, texts = (file.read_bytes().decode().strip("\n").split("\n") for file in (path, stories))
    if len(prompts) != len(texts):
        raise UsageError(f"{path} and {stories.name} have different numbers of lines")
    return [{"prompt": prompt, "story": story} for prompt, story in zip(prompts, texts, strict=True)]


READERS: dict[str, Callable[[Path], Iterable[object]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".wp_source": _prompts_and_stories,
}


def text_field(row: Fields, field: str) -> str:
    """The text of a field. Raises BadRow if it is missing, blank or not a text."""
    if field not in row:
        raise BadRow(f"the field {field} is missing")
    value = row[field]
    if not isinstance(value, str):
        raise BadRow(f"the field {field} must be a text, not {describe(value)}")
    return text_or_number(value, field)


def text_or_number(value: object, field: str) -> str:
    """A text that is not blank, or a number as a person writes it. Raises BadRow for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        number = Decimal(repr(float(value) + 0.0))  # not -0.0
        if len(number.as_tuple().digits) > 15:  # 0.1 + 0.2, or 3.14 in 32 bits
            raise BadRow(f"the field {field} holds {value!r}, which was rounded: write it as a text")
        return format(number, "f").removesuffix(".0")
    if not isinstance(value, str):
        raise BadRow(f"the field {field} must contain texts or numbers, not {describe(value)}")
    if not re.search(r"[^\s\u200b-\u200f\u2060\ufeff]", value):  # blanks, also those without a width
        raise BadRow(f"the field {field} contains an empty text")
    if re.search("[\0\ud800-\udfff]", value):
        raise BadRow(f"the field {field} contains half a character (a lone surrogate) or a NUL")
    return value


def gold_answers(value: object, field: str, kind: Kind) -> tuple[str, ...]:
    """The gold answers in a field: one, a list, or the JSON of a list of texts. Raises BadRow."""
    values = value if isinstance(value, list) else [value]
    if isinstance(value, str):
        values = _golds_in_text(value, f"the field {field} holds {value[:40]!r}", kind)
    if not values:
        raise BadRow(f"the field {field} has no gold answer")
    golds = tuple(text_or_number(gold, field) for gold in values)
    if any(map(SOLUTION.search, golds)):
        raise BadRow(f"the field {field} holds a whole solution, not its answer alone; {CONVERTER}")
    return golds


def _golds_in_text(text: str, found: str, kind: Kind) -> list[str]:
    """The items of a JSON list of texts, or the text itself. Raises BadRow for what may be either."""
    with suppress(ValueError, RecursionError):
        items = json.loads(text)
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
    one = f"write {json.dumps([text], ensure_ascii=False)[:80]}"
    if SPREADSHEET.fullmatch(text):
        raise BadRow(f"{found}, as programs write a number or a day: write it as people do, or {one}")
    if MISSING.fullmatch(text):
        raise BadRow(f"{found}, as programs write a missing value: remove the row, or {one}")
    if LIST_OF_TEXTS.search(text) or (kind != "math" and LIST_OR_PIPE.search(text)):
        raise BadRow(
            f"{found}, which may be one answer or several: {one}, or a JSON list of texts such as "
            '["Paris", "City of Paris"]'
        )
    return [text]


def describe(value: object) -> str:
    """The type and the beginning of a value, for error messages."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def id_from_text(text: str) -> str:
    """The id of a question that has none: the SHA-1 of its text."""
    return hashlib.sha1(text.encode()).hexdigest()


def paper_name(data_source: str) -> str:
    """The paper's name of a dataset in a published file: hotpot-256-test → HotpotQA; others unchanged."""
    return PAPER_NAMES.get(re.sub(r"(-\d+)+-\w+$", "", data_source), data_source)


def kind_of(dataset: str) -> Kind:
    """The kind of question in a dataset, by its name: math (a number), text (a long one) or qa (short)."""
    return KINDS.get(re.sub("[^a-z0-9]", "", dataset.lower()), "qa")


def without_dapo_wrapper(text: str) -> str:
    """The problem without the sentences that DAPO puts around it, which ask for another answer format."""
    return text.removeprefix(DAPO_OPENING).removesuffix(DAPO_CLOSING)


def question_key(text: str) -> str:
    """A key that is equal for questions that differ only in case, white space or DAPO's wrapper."""
    return " ".join(without_dapo_wrapper(text).casefold().split())
