"""Predictions for tests."""

from prompt_r1.data.datasets import kind_of_dataset
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.types import Kind, Question

GOLDS = ("Paris", "P.")
DIRECT = System("direct", "large")


def question_of(
    number: int = 1,
    *,
    dataset: str = "towns",
    kind: Kind = "qa",
    text: str = "Where?",
    answers: tuple[str, ...] = GOLDS,
) -> Question:
    return Question(f"q{number}", dataset, text, answers, kind)


def predict(
    number: int = 1,
    answer: str | None = "Paris",
    *,
    question: Question | None = None,
    system: System = DIRECT,
    sample: int = 0,
    error: str = "",
) -> Prediction:
    """An answer to question `number`, or to `question`; "Paris" is correct."""
    question = question or question_of(number)
    return Prediction(system, question, sample, answer, error=error)


def predict_all(correct: dict[str, list[bool]], system: System = DIRECT) -> list[Prediction]:
    """A correct or incorrect answer to each question of each dataset."""
    predictions = []
    for name, row in correct.items():
        kind = "text" if kind_of_dataset(name) == "text" else "qa"
        for number, is_correct in enumerate(row):
            question = question_of(number, dataset=name, kind=kind)
            answer = "Paris" if is_correct else "Lyon"
            predictions.append(predict(answer=answer, question=question, system=system))
    return predictions
