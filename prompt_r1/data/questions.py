"""Load questions by the names of --data."""

import sys
from collections.abc import Sequence
from typing import Any

from prompt_r1.data.files import as_questions, load_questions, question_key
from prompt_r1.data.sampler import stratified
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.questions import check_part, mini_questions
from prompt_r1.programs.launcher import is_first_rank
from prompt_r1.programs.text import printable
from prompt_r1.settings.agent import HELD_OUT, HUGGING_FACE_PREFIX, all_mini_data, is_mini_data, mini_part
from prompt_r1.settings.functions import OBJECT_PREFIX, import_object, user_code
from prompt_r1.types import Question


def find_questions(names: Sequence[str], split: str, seed: int) -> list[Question]:
    """The questions of the given names, in the order of the names.

    A name has one of these forms:

        FILE                a question file
        hf:ORG/NAME:SPLIT   a dataset of the Hub
        py:MODULE:FUNCTION  a function, which is called with `split` and `seed`
        mini                `split` of the mini world of `seed`
        mini:SPLIT          another split of this mini world
        mini:KIND           the questions of a kind in `split`

    Raises UsageError for a name that cannot be read.
    """
    questions: list[Question] = []
    for name in names:
        if is_mini_data(name):
            questions += mini_questions(seed, split, mini_part(name))
        elif name.startswith(OBJECT_PREFIX):
            questions += _questions_of_function(name.removeprefix(OBJECT_PREFIX), split, seed)
        else:
            found = load_questions(name)
            repeats = len(found) - len(_keys(found))
            if repeats:
                _say(f"{name}: {repeats:,} of {len(found):,} questions repeat others")
            questions += found
    return questions


def check_data(names: Sequence[str]) -> None:
    """Raise UsageError for a file of questions that cannot be read, and for an unknown mini:SPLIT.

    The Hub and functions are not asked.
    """
    for name in names:
        if is_mini_data(name):
            check_part(mini_part(name))
        elif not name.startswith((HUGGING_FACE_PREFIX, OBJECT_PREFIX)):
            load_questions(name)


def sample_questions(names: Sequence[str], split: str, seed: int, limit: int) -> list[Question]:
    """At most `limit` questions (0: all) of `names`, which have the forms that `find_questions` lists.

    The sample is random and stratified by dataset, because files may be sorted. The questions of the mini
    world are in random order already.
    """
    questions = find_questions(names, split, seed)
    if not all_mini_data(names):
        questions = stratified(questions)
    return questions[:limit] if limit else questions


def training_and_validation(
    data: Sequence[str], val_data: Sequence[str], *, seed: int, limit: int
) -> tuple[list[Question], list[Question]]:
    """The questions to train on, and at most `limit` (positive) to validate with.

    If `val_data` is `held-out`, a tenth of `data` is held out for validation, stratified by dataset. The
    other questions are trained on, without repeats of the held-out questions. Raises UsageError if none is
    left.
    """
    training = find_questions(data, "train", seed)
    if list(val_data) == [HELD_OUT]:
        a_tenth = len(training) // 10
        training, validation = hold_out(training, max(1, min(limit, a_tenth)))
        if not training:
            raise UsageError(
                "--val-data held-out leaves no question to train on: give --val-data FILE or none"
            )
        return training, validation
    validation = sample_questions(val_data, "validation", seed, limit)
    shared = len(_keys(training) & _keys(validation))
    if shared:
        _say(
            f"{shared:,} of {len(validation):,} validation questions are among the training questions; "
            "--exclude of `python -m prompt_r1.data mix` leaves them out"
        )
    return training, validation


def hold_out(questions: Sequence[Question], count: int) -> tuple[list[Question], list[Question]]:
    """Split off `count` held-out questions, a sample that is stratified by dataset.

    Returns the rest and the held-out questions. No text is in both lists, even if a file repeats a question.
    """
    held_out = stratified(questions)[:count]
    keys = _keys(held_out)
    rest = [question for question in questions if question_key(question.text) not in keys]
    return rest, held_out


def _keys(questions: Sequence[Question]) -> set[str]:
    """The keys by which questions are compared."""
    return {question_key(question.text) for question in questions}


def _say(text: str) -> None:
    """Print a note on stderr. Only the first rank prints."""
    if is_first_rank():
        print(printable(text), file=sys.stderr, flush=True)


def _questions_of_function(name: str, split: str, seed: int) -> list[Question]:
    """The rows that MODULE:FUNCTION yields for a split, with the fields of a question file."""
    where = f"--data {OBJECT_PREFIX}{name}"
    function: Any = import_object(name, where=where)
    with user_code(f"{where}, called with a split and a seed,"):
        rows = list(function(split, seed))
    function_name = name.rpartition(":")[2]
    return as_questions(where, enumerate(rows, start=1), dataset=function_name)
