"""Functions and objects that a user names as MODULE:NAME."""

import inspect
import math
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.types import Reward, Trajectory

OBJECT_PREFIX = "py:"  # py:MODULE:NAME is a user's environment, or a user's questions.


def import_object(name: str, *, where: str) -> Any:
    """Import MODULE:NAME, also from the current folder. Raises UsageError; its text begins with `where`."""
    module, _, attribute = name.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts) or module.endswith(".py"):
        raise UsageError(
            f"{where}: give MODULE:NAME, such as my_file:my_name or folder.my_file:my_name, not {name!r}"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where}: cannot import {name!r}: {error}") from None
    except (Exception, SystemExit) as error:  # Anything may go wrong in the user's module.
        raise UsageError(f"{where}: cannot import {name!r}: {described(error)}") from error


def import_reward(name: str) -> Callable[[Trajectory, Reward], float]:
    """The function MODULE:FUNCTION as a reward. Raises UsageError if it cannot be called with a game."""
    where = f"--reward {name}"
    function = import_object(name, where="--reward")
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"{where}: not a function")
    with suppress(ValueError):  # A function that is written in C may have no signature.
        try:
            inspect.signature(function).bind("game", "paper")
        except TypeError:
            raise UsageError(f"{where}: must take 2 arguments, game and reward of the paper") from None

    def failure(game: Trajectory, what: str) -> UsageError:
        end = f"{game.stop} after {len(game.turns)} turns, answer {(game.answer or '')[:80]!r}"
        return UsageError(f"{where}, question {game.question.id!r} (game: {end}), {what}")

    def reward(game: Trajectory, paper: Reward) -> float:
        try:
            value = float(function(game, paper))
        except (Exception, SystemExit) as error:
            raise failure(game, f"raised {described(error)}") from error
        if not math.isfinite(value):
            raise failure(game, f"returned {value}, not a finite number")
        return value

    return reward


def described(error: BaseException) -> str:
    """An error in a user's own code, on one line: its type, its text, and the file and line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # The text of a SyntaxError names the file.
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def parameters_of(function: Callable[..., object]) -> set[str]:
    """The names of a function's parameters."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # A function that is written in C may have no signature.
        return set()
