"""Predictions: one JSON line for each answer. A repeated evaluation asks only for what is missing."""

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.foreign import is_finite_number, make_folder
from prompt_r1.spending import Spending
from prompt_r1.terminal import printable_line
from prompt_r1.types import Question

logger = logging.getLogger(__name__)

FILE = "predictions.jsonl"


@dataclass(frozen=True)
class System:
    """What answers questions: a method with its environment and agent ("": it has none)."""

    method: str
    environment: str = ""
    agent: str = ""

    def __str__(self) -> str:
        parts = [part for part in (self.environment, self.agent) if part]
        return printable_line(f"{self.method} ({', '.join(parts)})" if parts else self.method)


def short_names(systems: Iterable[System]) -> dict[System, str]:
    """The method of each system, with its environment and agent if the method has several."""
    names, systems = {}, list(systems)
    for system in systems:
        same = [other for other in systems if other.method == system.method]
        environment = system.environment if len({other.environment for other in same}) > 1 else ""
        agent = system.agent if len({other.agent for other in same}) > 1 else ""
        names[system] = str(System(system.method, environment, agent))
    return names


@dataclass(frozen=True)
class Prediction:
    """One answer to a question and what it cost, whether it was paid now or reused from the journal.

    If `error` is set, the environment failed: the answer is not scored, and the next evaluation asks again.
    """

    question: Question
    answer: str | None  # None: no answer could be read, or the environment failed
    raw: str = ""  # the reply, the replies or the dialogue that the answer was taken from
    sample: int = 0  # number among the repeats of the question
    stop: str = "answered"  # how a game ended (types.Stop); "env_error" for any method
    error: str = ""  # why the environment failed
    turns: int = 1  # of the agent; 1 for a method without an agent
    spent: Spending = field(default_factory=Spending)  # on calls of the environment
    format: float | None = None  # 1: in the requested format, 0: not; None: no format was requested
    reward: float | None = None  # None: no game was played
    # Filled in by the evaluation:
    system: System = System("")
    metrics: Mapping[str, float] = field(default_factory=dict)  # each from 0 to 1; empty after an error

    @property
    def key(self) -> tuple[System, str, str, int]:
        return self.system, self.question.dataset, self.question.id, self.sample


# The fields that a line stores under their own names.
STORED_AS_IS = [
    f.name for f in fields(Prediction) if f.name not in ("question", "answer", "spent", "system", "metrics")
]
AMOUNTS = ("calls", "tokens_in", "tokens_out", "usd")  # and these of `spent`
NUMBERS = ("sample", "turns", *AMOUNTS)
TEXTS = ("method", "environment", "agent", "dataset", "kind", "id", "question", "raw", "stop", "error")


def to_row(prediction: Prediction) -> dict[str, object]:
    """The JSON object of a prediction: one flat line."""
    question = prediction.question
    return {
        **asdict(prediction.system),
        "dataset": question.dataset,
        "kind": question.kind,
        "id": question.id,
        "question": question.text,
        "answers": question.answers,
        "prediction": prediction.answer,
        **{name: getattr(prediction, name) for name in STORED_AS_IS},
        **{name: getattr(prediction.spent, name) for name in AMOUNTS},
        **prediction.metrics,
    }


def _from_row(row: Mapping[str, Any]) -> Prediction:
    """The prediction of a line, without its metrics, which follow from it."""
    answers = tuple(row["answers"])
    texts = [*(row[name] for name in TEXTS), *answers, "" if row["prediction"] is None else row["prediction"]]
    numbers = [row[name] for name in NUMBERS]
    numbers += [row[name] for name in ("format", "reward") if row[name] is not None]
    if not all(isinstance(text, str) for text in texts) or not all(map(is_finite_number, numbers)):
        raise TypeError("not the types that to_row writes")
    return Prediction(
        Question(row["id"], row["dataset"], row["question"], answers, row["kind"]),
        row["prediction"],
        spent=Spending(*(row[name] for name in AMOUNTS)),
        system=System(row["method"], row["environment"], row["agent"]),
        **{name: row[name] for name in STORED_AS_IS},
    )


def _parse(content: bytes) -> tuple[list[Prediction], int]:
    """The predictions in a file, of each the last line, and the number of damaged lines."""
    found, damaged = {}, 0
    for line in content.splitlines():
        try:
            prediction = _from_row(json.loads(line))
            found[prediction.key] = prediction
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    return list(found.values()), damaged


class PredictionFile:
    """The predictions of an evaluation folder, open for appending.

    Raises UsageError if another process has the file open.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent, lambda folder: path.exists(), "an evaluation")
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise UsageError(
                f"{path}: another evaluation is writing to this file; wait for it, or give another --out"
            ) from None
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.write(self._file, b"\n")  # the process was killed while it wrote the last line
        predictions, damaged = _parse(content)
        if damaged:
            logger.warning("%s: %d damaged lines are not used", path, damaged)
        self._predictions = {prediction.key: prediction for prediction in predictions}

    def find(self, system: System, question: Question, sample: int) -> Prediction | None:
        """The stored answer; None if there is none, if its call failed, or if the question has changed."""
        found = self._predictions.get((system, question.dataset, question.id, sample))
        if found is None or found.error:
            return None
        return found if _is_same(found.question, question) else None

    def answers_to(
        self, wanted: Iterable[tuple[Question, int]], systems: Iterable[System]
    ) -> list[Prediction]:
        """The stored answers to these questions and samples, also failed calls; those of `systems` first."""
        questions = {(question.dataset, question.id, sample): question for question, sample in wanted}
        order = dict.fromkeys([*systems, *(key[0] for key in self._predictions)])
        stored = [self._predictions.get((system, *key)) for system in order for key in questions]
        asked = [(one, questions[one.key[1:]]) for one in stored if one]
        return [replace(one, question=now) for one, now in asked if _is_same(one.question, now)]

    def add(self, prediction: Prediction) -> None:
        """Append a line with a single write, so that a kill leaves at most the last line incomplete."""
        os.write(self._file, (json.dumps(to_row(prediction), default=str) + "\n").encode())
        self._predictions[prediction.key] = prediction

    def close(self) -> None:
        os.close(self._file)


def _is_same(stored: Question, question: Question) -> bool:
    """Whether a question has not changed since it was answered."""
    return (stored.text, stored.answers) == (question.text, question.answers)


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions in a file. Raises UsageError if it holds none."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; evaluate.py writes {FILE} into its --out")
    predictions, _ = _parse(path.read_bytes())
    if not predictions:
        raise UsageError(f"{path}: the file holds no predictions of evaluate.py")
    return predictions
