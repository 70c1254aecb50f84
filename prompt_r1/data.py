"""Rows of files → questions, and the order in which training sees them.

Two formats: JSON lines, and the parquet files that the paper's authors published. A row that cannot be used
is an error that names it: nothing is skipped, and nothing is trained on silently.
"""

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from prompt_r1.types import Kind, Question, UsageError

if TYPE_CHECKING:
    from pyarrow import Table

if TYPE_CHECKING:
    from pyarrow import Table

ANSWER_FIELDS = ("answers", "golden_answers", "answer")
QUESTION_MARK = "Question: "
INSTRUCTION_START = "\nFirst, provide a simple explanation of the question"

# What the published files call their datasets, and the paper's name. The rows for training and validation all
# say hotpot_qa, whatever they come from.
PAPER_NAMES = {
    "2WikiMultihopQA": "2WikiMultihopQA", "hotpot": "HotpotQA", "gsm8k": "GSM8K", "dapo-math": "DAPO-Math",
    "MusiQue": "MuSiQue", "PopQA": "PopQA", "w-book": "BookSum", "wp": "WritingPrompts", "MathQA": "MathQA",
    "squad_v2": "SQuAD v2", "triviaqa_train": "TriviaQA", "xum": "XSum",
    "hotpotqa/hotpot_qa": "mixed",
}  # fmt: skip
MATH_NAMES = ("gsm8k", "dapo", "mathqa")
TEXT_NAMES = ("booksum", "writingprompts", "xsum")


class BadRow(Exception):
    """Why a row cannot be used; `load_questions` adds which."""


def load_questions(path: Path | str) -> list[Question]:
    """The questions of a .jsonl or .parquet file.

    A JSON line has `question` and `answers` (or `golden_answers`, or `answer`), and may have `id`, `dataset`
    (or `data_source`) and `kind`. Raises UsageError naming file, row (from 1) and reason.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; give a .jsonl or .parquet file of questions")
    if path.suffix == ".jsonl":
        questions = _read_json_lines(path)
    elif path.suffix == ".parquet":
        questions = _read_published(path)
    else:
        raise UsageError(f"{path}: only files ending in .jsonl or .parquet can be read")
    if not questions:
        raise UsageError(f"{path}: the file holds no questions")
    return questions


def _read_json_lines(path: Path) -> list[Question]:
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 inside a text.
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows_by_id: dict[str, int] = {}
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with _naming(path, number):
            question = _question_of(_parse_json(line), default_dataset=path.stem)
            if question.id in rows_by_id:
                raise BadRow(f"the id {question.id!r} is that of row {rows_by_id[question.id]} already")
        rows_by_id[question.id] = number
        questions.append(question)
    return questions


def _read_published(path: Path) -> list[Question]:
    """A parquet file as published. Some prompts occur twice there: the later one's id gets its row number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable parquet file ({str(error)[:120]!r})") from None
    ids: set[str] = set()
    questions = []
    for number in range(1, table.num_rows + 1):
        with _naming(path, number):
            question = _published_question(table.slice(number - 1, 1))
        if question.id in ids:
            question = replace(question, id=f"{question.id}-{number}")
        ids.add(question.id)
        questions.append(question)
    return questions


@contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    """Bad rows inside become UsageErrors that name file and row."""
    try:
        yield
    except BadRow as reason:
        raise UsageError(f"{path}, row {number}: {reason}") from None


def _parse_json(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON ({error})") from None


def _question_of(row: object, *, default_dataset: str) -> Question:
    if not isinstance(row, dict):
        raise BadRow(f"a JSON object is wanted, not {_name_of(row)}")
    text = _text(row, "question")
    field = next((name for name in ANSWER_FIELDS if name in row), None)
    if field is None:
        raise BadRow(f"one of the fields {', '.join(ANSWER_FIELDS)} is wanted")
    dataset = default_dataset
    if "dataset" in row:
        dataset = _text(row, "dataset")
    elif "data_source" in row:
        dataset = _paper_name(_text(row, "data_source"))
    kind = row.get("kind", _kind_of(dataset))
    if kind not in get_args(Kind):
        raise BadRow(f"kind is {kind!r}; choose one of {', '.join(get_args(Kind))}")
    name = _gold(row["id"], "id") if "id" in row else _digest(text)
    return Question(id=name, dataset=dataset, text=text, answers=_golds(row[field], field), kind=kind)


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
    content = _text(prompt[0], "content")
    end = content.rfind(INSTRUCTION_START)
    if not content.startswith(QUESTION_MARK) or end < 0:
        raise BadRow(f"the prompt must be {QUESTION_MARK!r}, the question and the published instruction")
    text = _checked(content[len(QUESTION_MARK) : end], "question")
    dataset = _paper_name(_text(row, "data_source"))
    golds = _golds(reward_model["ground_truth"], "ground_truth")
    return Question(id=_digest(text), dataset=dataset, text=text, answers=golds, kind=_kind_of(dataset))


def _text(row: Mapping[str, object], field: str) -> str:
    if field not in row:
        raise BadRow(f"the field {field} is missing")
    value = row[field]
    if not isinstance(value, str):
        raise BadRow(f"the field {field} must be a text, not {_name_of(value)}")
    return _checked(value, field)


def _golds(value: object, field: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise BadRow(f"the field {field} holds no gold answer")
    return tuple(_gold(gold, field) for gold in values)


def _gold(value: object, field: str) -> str:
    """A text, or a number as a text."""
    if isinstance(value, str):
        return _checked(value, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"the field {field} must hold texts or numbers, not {_name_of(value)}")
    return str(value)


def _checked(text: str, field: str) -> str:
    if not text.strip():
        raise BadRow(f"the field {field} holds an empty text")
    if re.search("[\ud800-\udfff]", text):
        raise BadRow(f"the field {field} holds half a character (a lone surrogate)")
    return text


def _name_of(value: object) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def _paper_name(data_source: str) -> str:
    """hotpot-256-test → HotpotQA. Names that are not among the published ones stay as they are."""
    return PAPER_NAMES.get(re.sub(r"(-\d+)+-\w+$", "", data_source), data_source)


def _kind_of(dataset: str) -> Kind:
    letters = re.sub("[^a-z0-9]", "", dataset.lower())
    if any(name in letters for name in MATH_NAMES):
        return "math"
    return "text" if any(name in letters for name in TEXT_NAMES) else "qa"


class QuestionSampler:
    """Question after question in shuffled epochs: the same order for the same seed, and resumable."""

    def __init__(self, questions: Sequence[Question], *, seed: int) -> None:
        assert questions, "no questions to sample from"
        self.questions = questions
        self.seed = seed
        self._start_epoch(0)

    def take(self, count: int) -> list[Question]:
        """The next `count` questions, over the end of the epoch if need be."""
        taken: list[Question] = []
        while len(taken) < count:
            if self.position == len(self.questions):
                self._start_epoch(self.epoch + 1)
            chosen = self.order[self.position : self.position + count - len(taken)]
            taken += [self.questions[index] for index in chosen]
            self.position += len(chosen)
        return taken

    def state(self) -> dict[str, int]:
        """Where the sampler is; the order itself follows from the seed."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: Mapping[str, int]) -> None:
        if not 0 <= state["position"] <= len(self.questions):
            raise UsageError(f"the checkpoint stopped at question {state['position']}, but the data has only "
                             f"{len(self.questions)}: give the data that the run began with")  # fmt: skip
        self._start_epoch(state["epoch"])
        self.position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.position = 0
        self.order = list(range(len(self.questions)))
        random.Random(f"questions {self.seed} {epoch}").shuffle(self.order)
