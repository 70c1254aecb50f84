"""Answers of an evaluation, one JSON line each, written as it comes: a rerun asks only for what is not there.

A line belongs to its *setting*, a digest of all that shapes the answer (method, agent, environment, their
knobs). Lines of other settings stay in the file and out of the tables.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from prompt_r1.errors import UsageError
from prompt_r1.types import Kind, Question


@dataclass(frozen=True)
class System:
    """What answers questions: a method with its environment and agent ("" where it has none)."""

    method: str
    environment: str = ""
    agent: str = ""

    def __str__(self) -> str:
        parts = [part for part in (self.environment, self.agent) if part]
        return f"{self.method} ({', '.join(parts)})" if parts else self.method


@dataclass(frozen=True)
class Prediction:
    """How a question was answered once. `error`: the environment failed; not scored, and asked again."""

    method: str
    environment: str
    agent: str
    setting: str
    dataset: str
    kind: Kind
    id: str
    sample: int  # number among the repeats of the question
    question: str
    answers: tuple[str, ...]  # gold
    prediction: str | None  # None: nothing that could be read as an answer
    raw: str = ""  # the dialogue, or the reply that the prediction was cut from
    stop: str = ""
    error: str = ""
    turns: int = 0
    calls: int = 0  # of the environment
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0
    format: float | None = None  # 1: every turn was well-formed and the last one answered; None: no game
    reward: float | None = None

    @property
    def system(self) -> System:
        return System(self.method, self.environment, self.agent)

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.setting, self.dataset, self.id, self.sample


class PredictionFile:
    """The predictions of an evaluation folder, open for more. Raises UsageError if another process has it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise UsageError(
                f"{path}: another evaluation writes there; wait, or give another --out"
            ) from None
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.write(self._file, b"\n")  # a kill tore the last line
        self._known = {prediction.key: prediction for prediction in _parse(content)}

    def find(self, setting: str, question: Question, sample: int) -> Prediction | None:
        """The answer that is there already; None where there is none, or only a failed call."""
        found = self._known.get((setting, question.dataset, question.id, sample))
        if (
            found is None
            or found.error
            or (found.question, found.answers) != (question.text, question.answers)
        ):
            return None
        return found

    def those(self, setting: str, wanted: Iterable[tuple[Question, int]]) -> list[Prediction]:
        """What there is of the wanted answers, failed calls included."""
        keys = [(setting, question.dataset, question.id, sample) for question, sample in wanted]
        return [self._known[key] for key in keys if key in self._known]

    def add(self, prediction: Prediction, **extra: float) -> None:
        """Append a line. One write: a kill leaves at most one torn line, the last. `extra`: for readers."""
        line = json.dumps(asdict(prediction) | extra) + "\n"
        os.write(self._file, line.encode())
        self._known[prediction.key] = prediction

    def close(self) -> None:
        os.close(self._file)


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions of a file, of each key the last line. Raises UsageError if it is not such a file."""
    if not path.is_file():
        raise UsageError(
            f"{path}: there is no such file; evaluate.py writes predictions.jsonl into its --out"
        )
    predictions = {prediction.key: prediction for prediction in _parse(path.read_bytes())}
    if not predictions:
        raise UsageError(f"{path}: the file holds no predictions of evaluate.py")
    return list(predictions.values())


def _parse(content: bytes) -> Iterator[Prediction]:
    """The whole lines; a torn one is passed over."""
    names = {f.name for f in fields(Prediction)}
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
            row["answers"] = tuple(row["answers"])
            yield Prediction(**{name: value for name, value in row.items() if name in names})
        except (ValueError, TypeError, KeyError):
            continue


def systems_of(predictions: Iterable[Prediction]) -> list[System]:
    """The systems, in the order in which they first appear."""
    return list(dict.fromkeys(prediction.system for prediction in predictions))
