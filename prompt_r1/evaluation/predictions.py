"""Predictions: one JSON line for each answer. A repeated evaluation asks only for what is missing."""

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.programs.files import is_finite_number, make_folder
from prompt_r1.programs.terminal import printable_line
from prompt_r1.types import Question, Spending

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
    metrics: dict[str, float] = field(default_factory=dict)  # each from 0 to 1; empty after an error


STORED_AS_IS = ("raw", "sample", "stop", "error", "turns", "format", "reward")  # under these names in a line
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
    }


def _from_row(row: Mapping[str, Any]) -> Prediction:
    """The prediction of a line."""
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


def _key(system: System, question: Question, sample: int) -> tuple[object, ...]:
    """What tells an answer from others. A question with another text or other gold answers is another one."""
    return system, question.dataset, question.id, question.text, question.answers, sample


def _parse(content: bytes) -> tuple[dict[tuple[object, ...], Prediction], int]:
    """The predictions in a file by their keys, of each the last line, and the number of damaged lines."""
    found, damaged = {}, 0
    for line in content.splitlines():
        try:
            one = _from_row(json.loads(line))
            found[_key(one.system, one.question, one.sample)] = one
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    return found, damaged


class PredictionFile:
    """The predictions of an evaluation, open for appending. Raises UsageError if another process has them."""

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
        self._predictions, damaged = _parse(content)
        if damaged:
            logger.warning("%s: %d damaged lines are not used", path, damaged)

    def find(self, system: System, question: Question, sample: int) -> Prediction | None:
        """The stored answer; None if there is none, if its call failed, or if the question has changed."""
        found = self._predictions.get(_key(system, question, sample))
        return None if found is None or found.error else found

    def answers_to(
        self, wanted: Sequence[tuple[Question, int]], systems: Iterable[System]
    ) -> list[Prediction]:
        """The stored answers to these questions and samples, also failed calls; those of `systems` first."""
        order = dict.fromkeys([*systems, *(one.system for one in self._predictions.values())])
        asked = [(system, *pair) for system in order for pair in wanted]
        found = [(self._predictions.get(_key(*one)), one[1]) for one in asked]
        return [replace(one, question=question) for one, question in found if one]  # it may have another kind

    def add(self, prediction: Prediction) -> None:
        """Append a line with a single write, so that a kill leaves at most the last line incomplete."""
        os.write(self._file, (json.dumps(to_row(prediction), default=str) + "\n").encode())
        self._predictions[_key(prediction.system, prediction.question, prediction.sample)] = prediction

    def close(self) -> None:
        os.close(self._file)


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions in a file. Raises UsageError if it holds none."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; evaluate.py writes {FILE} into its --out")
    predictions, _ = _parse(path.read_bytes())
    if not predictions:
        raise UsageError(f"{path}: the file holds no predictions of evaluate.py")
    return list(predictions.values())
