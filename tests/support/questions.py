"""Lists of questions in tests."""

from prompt_r1.types import Question


def ids(questions: list[Question]) -> list[str]:
    """The ids, in the order of the questions."""
    return [question.id for question in questions]
