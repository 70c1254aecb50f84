"""Predictions: one JSON line for each answer. A repeated evaluation asks only for what is missing."""

import json
import logging
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.programs.files import append_line, lock, make_folder
from prompt_r1.programs.text import printable_line
from prompt_r1.reward import well_formed
from prompt_r1.spending import Spending
from prompt_r1.types import Question, Reward, Trajectory

logger = logging.getLogger(__name__)

FILE = "predictions.jsonl"


@dataclass(frozen=True)
class System:
    """A method with the names of its environment and its agent, or "" where it has none."""

    method: str
    environment: str = ""
    agent: str = ""

    def __str__(self) -> str:
        parts = [part for part in (self.environment, self.agent) if part]
        return printable_line(f"{self.method} ({', '.join(parts)})" if parts else self.method)


def short_names(systems: Iterable[System]) -> dict[System, str]:
    """Name each system by its method, and by its environment and agent if the method has several."""
    systems = list(systems)
    names = {}
    for system in systems:
        same_method = [other for other in systems if other.method == system.method]
        environments = {other.environment for other in same_method}
        agents = {other.agent for other in same_method}
        environment = system.environment if len(environments) > 1 else ""
        agent = system.agent if len(agents) > 1 else ""
        names[system] = str(System(system.method, environment, agent))
    return names


@dataclass(frozen=True)
class Prediction:
    """One answer to a question, and what the answer cost.

    Replies that are reused from the journal count with their first cost. If `error` is set, the environment
    failed: the answer is not scored, and the next evaluation asks again.
    """

    system: System
    question: Question
    sample: int  # the number of the repeat (--repeats)
    answer: str | None  # None: no answer could be read, or the environment failed.
    raw: str = ""  # the reply, the replies or the dialogue that the answer was taken from
    # How the game ended (types.Stop). For a method without a game: "answered", or "env_error" after a failed
    # call.
    stop: str = "answered"
    error: str = ""  # why the environment failed
    turns: int | None = None  # turns of the agent; None: no game was played.
    spent: Spending = field(default_factory=Spending)  # calls of the environment
    format: float | None = None  # 1: in the requested format, 0: not; None: no format was requested.
    reward: float | None = None  # None: no game was played.


def prediction_of(system: System, game: Trajectory, sample: int, reward: Reward | None) -> Prediction:
    """The answer of a game. `reward` is None if the environment broke the game."""
    prediction = Prediction(
        system,
        game.question,
        sample,
        game.answer,
        _dialogue(game),
        stop=str(game.stop),
        turns=len(game.turns),
        spent=game.spent,
    )
    if reward is None:
        return replace(prediction, error=game.error or "the environment failed")
    return replace(prediction, format=float(well_formed(game)), reward=reward.total)


def _dialogue(game: Trajectory) -> str:
    """What the agent wrote and what the environment replied, line by line."""
    lines = []
    for turn in game.turns:
        lines.append(turn.text)
        if turn.reply is not None:
            lines.append(turn.reply)
    return "\n".join(lines)


def to_row(prediction: Prediction) -> dict[str, object]:
    """The JSON object of a prediction: one flat line."""
    question, spent = prediction.question, prediction.spent
    return {
        **asdict(prediction.system),
        "dataset": question.dataset,
        "kind": question.kind,
        "id": question.id,
        "question": question.text,
        "answers": question.answers,
        "prediction": prediction.answer,
        "raw": prediction.raw,
        "sample": prediction.sample,
        "stop": prediction.stop,
        "error": prediction.error,
        "turns": prediction.turns,
        "format": prediction.format,
        "reward": prediction.reward,
        "calls": spent.calls,
        "tokens_in": spent.tokens_in,
        "tokens_out": spent.tokens_out,
        "usd": spent.usd,
    }


def _from_row(row: Mapping[str, Any]) -> Prediction:
    """The prediction of a line. Raises KeyError or TypeError for a line that `to_row` did not write."""
    return Prediction(
        System(row["method"], row["environment"], row["agent"]),
        Question(row["id"], row["dataset"], row["question"], tuple(row["answers"]), row["kind"]),
        row["sample"],
        row["prediction"],
        raw=row["raw"],
        stop=row["stop"],
        error=row["error"],
        turns=row["turns"],
        format=row["format"],
        reward=row["reward"],
        spent=Spending(row["calls"], row["tokens_in"], row["tokens_out"], row["usd"]),
    )


Key = tuple[Hashable, ...]


def _key(system: System, question: Question, sample: int) -> Key:
    """What a system was asked. A question with another text or other gold answers is another question."""
    return system, question.dataset, question.id, question.text, question.answers, sample


def _parse(content: bytes) -> tuple[dict[Key, Prediction], int]:
    """The predictions in a file, and the number of damaged lines. Of several answers the last counts."""
    found: dict[Key, Prediction] = {}
    damaged = 0
    for line in content.splitlines():
        try:
            prediction = _from_row(json.loads(line))
            # A part of the key that is a list or an object cannot be hashed.
            found[_key(prediction.system, prediction.question, prediction.sample)] = prediction
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    return found, damaged


class PredictionFile:
    """The predictions of an evaluation, open for appending. Raises UsageError if another process appends."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent, lambda folder: path.exists(), "an evaluation")
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        if not lock(self._file, path):
            os.close(self._file)
            raise UsageError(
                f"{path}: another evaluation is writing to this file; wait for it, or give another --out"
            )
        self._predictions, damaged = _parse(path.read_bytes())
        if damaged:
            logger.warning("%s: %d damaged lines are not used", path, damaged)

    def find(self, system: System, question: Question, sample: int) -> Prediction | None:
        """The stored answer; None if it is missing, if its call failed, or if the question has changed."""
        found = self._predictions.get(_key(system, question, sample))
        if found is None or found.error:
            return None
        return found

    def answers_to(
        self, wanted: Sequence[tuple[Question, int]], *, first: Iterable[System]
    ) -> list[Prediction]:
        """The stored answers to these questions and samples, failed calls included.

        The answers of the systems in `first` come first, and then those of all other systems in the file.
        """
        stored = [prediction.system for prediction in self._predictions.values()]
        answers = []
        for system in dict.fromkeys([*first, *stored]):
            for question, sample in wanted:
                found = self._predictions.get(_key(system, question, sample))
                if found is not None:
                    # The kind of the question may have changed since it was answered.
                    answers.append(replace(found, question=question))
        return answers

    def add(self, prediction: Prediction) -> None:
        """Append a prediction. A kill or a full disk loses at most this prediction."""
        append_line(self._file, json.dumps(to_row(prediction), default=str))
        self._predictions[_key(prediction.system, prediction.question, prediction.sample)] = prediction

    def close(self) -> None:
        os.close(self._file)


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions in a file. Raises UsageError if the file holds no predictions."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; evaluate.py writes {FILE} into its --out")
    predictions, _ = _parse(path.read_bytes())
    if not predictions:
        raise UsageError(f"{path}: the file holds no predictions of evaluate.py")
    return list(predictions.values())
