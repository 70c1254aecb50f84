"""Functions and objects that a user names as MODULE:NAME."""

import inspect
import math
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.types import Question, Reward, Trajectory

Metric = Callable[[str, Question], float]
OwnReward = Callable[[Trajectory, Reward], float]
OBJECT_PREFIX = "py:"  # of an environment that is an object of the user's: py:MODULE:NAME


def import_object(name: str, *, where: str) -> Any:
    """Import MODULE:NAME, also from the current folder. Raises UsageError, which begins with `where`."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"{where}: give MODULE:NAME, such as my_file:my_name, not {name!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where}: cannot import {name!r}: {error}") from None
    except Exception as error:  # the module is the user's: anything may go wrong in it
        raise UsageError(f"{where}: cannot import {name!r}: {described(error)}") from error
    return found


def import_metric(name: str) -> Metric:
    """The metric of answers called MODULE:FUNCTION, which also gets the `question` if it takes it.

    Raises UsageError if it cannot be imported.
    """
    where = f"--answer-metric {name}"
    function = _import_function(name, "--answer-metric", takes=("prediction", "gold answers"))

    def metric(prediction: str, question: Question) -> float:
        golds = list(question.answers)
        what = f"{where}, question {question.id!r}, answer {prediction[:80]!r} with golds {golds[:3]!r:.200},"
        call = partial(function, question=question) if takes_question else function
        value = _call(call, prediction, golds, where=what)
        if not 0 <= value <= 1:
            raise UsageError(f"{where} returned {value} for {prediction!r}, not 0 to 1")
        return value

    takes_question = "question" in parameters_of(function)
    return metric


def import_reward(name: str) -> OwnReward:
    """The reward of games called MODULE:FUNCTION. Raises UsageError if it cannot be imported."""
    where = f"--reward {name}"
    function = _import_function(name, "--reward", takes=("game", "reward of the paper"))

    def reward(game: Trajectory, paper: Reward) -> float:
        end = f"{game.stop} after {len(game.turns)} turns, answer {(game.answer or '')[:80]!r}"
        what = f"{where}, question {game.question.id!r} (game: {end}),"
        value = _call(function, game, paper, where=what)
        if not math.isfinite(value):
            raise UsageError(
                f"{where} returned {value} for question {game.question.id!r}, not a finite number"
            )
        return value

    return reward


def described(error: Exception) -> str:
    """An error in a user's own code as one line: its type, its text, and the line of the file."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # its text names the file
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def parameters_of(function: Callable[..., object]) -> set[str]:
    """The names of a function's parameters."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some that are written in C have none
        return set()


def _import_function(name: str, flag: str, *, takes: tuple[str, ...]) -> Callable[..., object]:
    """Import a function and check that it can be called with these arguments, before anything is paid."""
    function: Any = import_object(name, where=flag)
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"{flag} {name}: not a function")
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"{flag} {name}: an asynchronous function; give a plain one")
    also = {"question": None} if "question" in parameters_of(function) else {}
    try:
        inspect.signature(function).bind(*takes, **also)
    except TypeError:
        raise UsageError(f"{flag} {name}: must take {len(takes)} arguments, {' and '.join(takes)}") from None
    except ValueError:
        pass  # built in, without a signature
    return function


def _call(function: Callable[..., object], *arguments: object, where: str) -> float:
    """The number that a user's function returns. Raises UsageError."""
    try:
        value: Any = function(*arguments)
    except Exception as error:
        raise UsageError(f"{where} raised {described(error)}") from error
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{where} returned {type(value).__name__}, not a number") from None
