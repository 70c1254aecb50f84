"""Tasks of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760) and their verifiers."""

import json
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from prompt_r1.errors import EnvError, Resumable, UsageError
from prompt_r1.metrics.em_f1 import f1
from prompt_r1.tasks.packages import REASONING_GYM, SPLITS, TaskSplit, check_known, import_package, split_of
from prompt_r1.types import Question

WATCHED = 200  # most recent answers
STOP_ABOVE = 0.05  # share of them whose verifier failed


def reasoning_questions(task: str, split: str, seed: int, args: str) -> list[Question]:
    """The questions of a split. Training sees no text of the other splits.

    Raises UsageError for an unknown task, wrong `args`, and a task without gold answers.
    """
    parts = {name: _questions(split_of(task, name, seed, args)) for name in SPLITS}
    if split != "train":
        return parts[split]
    held_out = {question.text for name in SPLITS if name != "train" for question in parts[name]}
    rest = [question for question in parts["train"] if question.text not in held_out]
    if not rest:
        raise UsageError(
            f"{REASONING_GYM}:{task} has so few questions that validation and test take all: give larger "
            "sizes by --data-args"
        )
    return rest


def uses_verifier(names: Iterable[str]) -> bool:
    """Whether one of these names of --data has a verifier of its own."""
    return any(name.startswith(f"{REASONING_GYM}:") for name in names)


class Verifier:
    """Scores answers by the `score_answer` of their task, and those to other questions by F1.

    Raises EnvError if a verifier fails twice on an answer, and Resumable if too many do.
    """

    def __init__(self) -> None:
        self._failed: deque[bool] = deque(maxlen=WATCHED)

    def __call__(self, answer: str, question: Question) -> float:
        if question.extra.get("package") != REASONING_GYM:
            return f1(answer, question.answers)
        reason = ""
        for _ in range(2):
            try:
                score = _score(answer, question)
            except UsageError:
                raise
            except Exception as error:  # anything may go wrong in their code
                reason = f"the verifier of {question.id} raised {type(error).__name__}: {error}"
            else:
                self._failed.append(False)
                return score
        self._failed.append(True)
        failures = sum(self._failed)
        if failures > STOP_ABOVE * WATCHED:
            raise Resumable(
                f"{failures} of the last {len(self._failed)} answers could not be scored: {reason}"
            )
        raise EnvError(reason)


def _score(answer: str, question: Question) -> float:
    extra: Any = question.extra
    dataset = _dataset(extra["task"], 0, 1, json.dumps(extra["args"], sort_keys=True))
    score = float(dataset.score_answer(answer=answer, entry=extra["entry"]))
    if not 0 <= score <= 1:
        raise ValueError(f"a score of {score}, not 0 to 1")
    return score


@lru_cache(maxsize=64)
def _dataset(task: str, seed: int, size: int, args: str) -> Any:
    """Their dataset, which makes an entry when it is asked for it."""
    package = import_package(REASONING_GYM)
    check_known(REASONING_GYM, task, package.factory.DATASETS)
    try:
        return package.create_dataset(task, seed=seed, size=size, **json.loads(args))
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"--data-args for {REASONING_GYM}:{task}: {error}") from None


@lru_cache(maxsize=8)  # each split needs the texts of the others
def _entries(task: str, seed: int, size: int, args: str) -> list[dict[str, Any]]:
    dataset = _dataset(task, seed, size, args)
    return [dataset[index] for index in range(size)]


def _questions(part: TaskSplit) -> list[Question]:
    questions = []
    entries = _entries(part.task, part.seed, part.size, json.dumps(part.args, sort_keys=True))
    for index, entry in enumerate(entries):
        if not isinstance(entry["answer"], str) or not entry["answer"].strip():
            raise UsageError(f"{REASONING_GYM}:{part.task} has questions without a gold answer")
        extra = {"package": REASONING_GYM, "task": part.task, "args": part.args, "entry": entry}
        name = f"{part.task}/{part.seed}/{index}"
        questions.append(Question(name, part.task, entry["question"], (entry["answer"],), extra=extra))
    return questions
