"""Predictions: one JSON line for each answer.

A repeated evaluation asks only the questions that are missing. A line belongs to its *setting*, a digest of
everything that affects the answer: method, agent, environment and their settings. Lines of other settings
stay in the file but do not enter the tables.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import get_args

from prompt_r1.errors import UsageError
from prompt_r1.foreign import is_finite_number, make_folder
from prompt_r1.spending import Spending
from prompt_r1.terminal import printable_line
from prompt_r1.types import Kind, Question


@dataclass(frozen=True)
class System:
    """What answers questions: a method with its environment and agent ("": it has none)."""

    method: str
    environment: str = ""
    agent: str = ""

    def __str__(self) -> str:
        parts = [part for part in (self.environment, self.agent) if part]
        return printable_line(f"{self.method} ({', '.join(parts)})" if parts else self.method)


def system_names(systems: Sequence[System], renamed: Mapping[str, str]) -> dict[System, str]:
    """The method of each system, with its environment and agent if the method has several.

    `renamed`: other names of methods.
    """
    names = {}
    for system in systems:
        same_method = [other for other in systems if other.method == system.method]
        parts = []
        if len({other.environment for other in same_method}) > 1:
            parts.append(system.environment)
        if len({other.agent for other in same_method}) > 1:
            parts.append(system.agent)
        name = renamed.get(system.method, system.method)
        names[system] = f"{name} ({', '.join(parts)})" if parts else name
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
    setting: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)  # each from 0 to 1; empty after an error

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.setting, self.question.dataset, self.question.id, self.sample


# The fields that a line stores under their own names.
STORED_AS_IS = [
    f.name for f in fields(Prediction) if f.name not in ("question", "answer", "spent", "system", "metrics")
]
AMOUNTS = ("calls", "tokens_in", "tokens_out", "usd")  # and these of `spent`


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
        **({"extra": dict(question.extra)} if question.extra else {}),  # a metric may read it
    }


def _parse(content: bytes) -> dict[tuple[str, str, str, int], Prediction]:
    """The predictions in a file by key, the last line of each. Skips damaged lines.

    They have no metrics, which follow from the answers.
    """
    found = {}
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
            answers = tuple(row["answers"])
            prediction = Prediction(
                Question(
                    row["id"], row["dataset"], row["question"], answers, row["kind"], row.get("extra", {})
                ),
                row["prediction"],
                spent=Spending(*(row[name] for name in AMOUNTS)),
                system=System(row["method"], row["environment"], row["agent"]),
                **{name: row[name] for name in STORED_AS_IS if name in row},
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if isinstance(row["answers"], list) and _has_valid_fields(prediction):
            found[prediction.key] = prediction
    return found


def _has_valid_fields(one: Prediction) -> bool:
    """Whether texts are texts and numbers are finite numbers."""
    question, system = one.question, one.system
    texts = [question.id, question.dataset, question.text, *question.answers, one.answer or ""]
    texts += [system.method, system.environment, system.agent, one.raw, one.stop, one.error, one.setting]
    numbers = [one.sample, one.turns, *one.spent.amounts]
    numbers += [number for number in (one.format, one.reward) if number is not None]
    are_texts = all(isinstance(text, str) for text in texts) and question.kind in get_args(Kind)
    are_texts = are_texts and isinstance(question.extra, dict)
    return are_texts and all(map(is_finite_number, numbers))


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
        self._predictions = _parse(content)

    def find(self, setting: str, question: Question, sample: int) -> Prediction | None:
        """The stored answer; None if there is none, if its call failed, or if the question has changed."""
        found = self._predictions.get((setting, question.dataset, question.id, sample))
        if found is None or found.error:
            return None
        unchanged = (found.question.text, found.question.answers) == (question.text, question.answers)
        return found if unchanged else None

    def predictions_for(self, setting: str, wanted: Iterable[tuple[Question, int]]) -> list[Prediction]:
        """The stored answers to these questions and samples, including failed calls."""
        keys = [(setting, question.dataset, question.id, sample) for question, sample in wanted]
        return [self._predictions[key] for key in keys if key in self._predictions]

    def add(self, prediction: Prediction) -> None:
        """Append a line with a single write, so that a kill leaves at most the last line incomplete."""
        os.write(self._file, (json.dumps(to_row(prediction), default=str) + "\n").encode())
        self._predictions[prediction.key] = prediction

    def close(self) -> None:
        os.close(self._file)


def read_predictions(path: Path) -> list[Prediction]:
    """Each system's predictions with its newest setting. Raises UsageError if the file holds none."""
    if not path.is_file():
        raise UsageError(
            f"{path}: there is no such file; evaluate.py writes predictions.jsonl into its --out"
        )
    predictions = _parse(path.read_bytes())
    if not predictions:
        raise UsageError(f"{path}: the file holds no predictions of evaluate.py")
    newest = {one.system: one.setting for one in predictions.values()}
    return [one for one in predictions.values() if one.setting == newest[one.system]]
