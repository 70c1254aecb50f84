"""Question sets by the names that a user writes."""

from collections.abc import Iterable
from pathlib import Path

from prompt_r1.data import load_questions
from prompt_r1.errors import UsageError
from prompt_r1.types import Question


def find_questions(names: Iterable[str], split: str, seed: int) -> list[Question]:
    """The questions of `mini` (its `split`, or mini:SPLIT) and of files, one after the other."""
    questions: list[Question] = []
    for name in names:
        world, _, part = name.partition(":")
        questions += _mini_questions(part or split, seed) if world == "mini" else load_questions(Path(name))
    return questions


def _mini_questions(split: str, seed: int) -> list[Question]:
    from prompt_r1.miniworld import mini_world

    splits = ("train", "validation", "test", "ood")
    if split not in splits:
        raise UsageError(f"the mini world has no split {split!r}: choose one of {', '.join(splits)}")
    return getattr(mini_world(seed), split)
