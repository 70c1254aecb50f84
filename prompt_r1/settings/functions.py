"""Functions and objects that a user names as MODULE:NAME."""

import inspect
import math
import reprlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.reward import OwnReward
from prompt_r1.types import Question, Reward, ScoredGame, Trajectory

OwnLoss = Callable[..., Any]  # It is called as `grpo.grpo_loss`, and returns a `grpo.Loss`.

OBJECT_PREFIX = "py:"  # py:MODULE:NAME is a user's environment, or a user's questions.
# Keywords of `grpo.grpo_loss`, which a user's loss takes too.
LOSS_SETTINGS = ("clip", "clip_high", "kl_coef", "importance_cap")
# Python's importer, and the folders of Python, of its packages and of this package: code that is not the
# user's.
LIBRARIES = (
    "<frozen importlib.",
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}/",  # A user's file may be named prompt_r1_reward.py.
)


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
    except (Exception, SystemExit) as error:  # Anything may go wrong in the user's module.
        raise UsageError(f"{where}: cannot import {name!r}: {described(error)}") from error


def import_function(
    name: str, *, flag: str, takes: Sequence[str], keywords: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function MODULE:FUNCTION that a flag names. Raises UsageError if it does not take these arguments.

    `takes` are the positional arguments, by their names in error messages. `keywords` are the others.
    """
    where = f"{flag} {name}"
    function = import_object(name, where=flag)
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"{where}: not a function")
    try:
        # Any values do: only their number and the names of keywords are checked.
        inspect.signature(function).bind(*takes, **dict.fromkeys(keywords))
    except (TypeError, ValueError):  # ValueError: a function that is written in C may have no signature.
        arguments = "1 argument" if len(takes) == 1 else f"{len(takes)} arguments"
        also = f", and the keywords {', '.join(keywords)} (or **settings)" if keywords else ""
        raise UsageError(f"{where}: must take {arguments}, {' and '.join(takes)}{also}") from None
    return function


@contextmanager
def user_code(what: str, *, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Inside `with`, an error in a user's own code becomes a UsageError: "`what` raised …".

    UsageError and the errors in `passes` pass unchanged, because the user's code may raise them on purpose.
    """
    try:
        yield
    except UsageError:
        raise
    except passes:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} raised {described(error)}") from error


def described(error: BaseException) -> str:
    """An error in a user's own code, on one line: its type, its text, and the file and line.

    Where a library raised the error, the line is the user's line that called it. An error of our call of the
    user's function, such as a wrong number of arguments, has no line of the user.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # The text of a SyntaxError names the file.
        return text
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    if not own:
        return text
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})"


def import_reward(name: str) -> OwnReward:
    """The function MODULE:FUNCTION as a reward. Raises UsageError if it cannot be called with a game."""
    where = f"--reward {name}"
    function = import_function(name, flag="--reward", takes=("game", "reward of the paper"))

    def reward(game: Trajectory, paper: Reward) -> float:
        end = f"{game.stop} after {len(game.turns)} turns, answer {(game.answer or '')[:80]!r}"
        what = f"{where}, question {game.question.id!r} (game: {end}),"
        with user_code(what):
            returned = function(game, paper)
        value = _number_of(returned)
        if not math.isfinite(value):
            raise UsageError(f"{what} returned {reprlib.repr(returned)}, not a finite number")
        return value

    return reward


def import_metric(name: str) -> Callable[[str, Question], float]:
    """The function MODULE:FUNCTION as a metric: an answer and its question → 0 to 1.

    Raises UsageError if it cannot be called so, or returns anything else.
    """
    where = f"--metric {name}"
    function = import_function(name, flag="--metric", takes=("answer", "question"))

    def metric(answer: str, question: Question) -> float:
        what = f"{where}, question {question.id!r} (answer: {answer[:80]!r}),"
        with user_code(what):
            returned = function(answer, question)
        value = _number_of(returned)
        if not 0 <= value <= 1:  # Wilson's interval needs a rate. NaN is none.
            raise UsageError(f"{what} returned {reprlib.repr(returned)}, not a number from 0 to 1")
        return value

    return metric


def _number_of(returned: Any) -> float:
    """What a user's function returned, as a number; NaN for anything else, such as None or a text."""
    try:
        return float(returned)
    except Exception:  # Each type has errors of its own.
        return math.nan


def import_loss(name: str) -> OwnLoss:
    """The function MODULE:FUNCTION of --loss-function itself.

    What it raises and returns is checked by `loss_of_run` in training/loss_function.py, which needs torch.
    Raises UsageError if it cannot be called with the tokens, their columns and LOSS_SETTINGS.
    """
    return import_function(
        name, flag="--loss-function", takes=("logprobs", "columns"), keywords=LOSS_SETTINGS
    )


def import_advantages(name: str) -> Callable[[Sequence[ScoredGame]], list[list[float]]]:
    """The function MODULE:FUNCTION as advantages of a group's games: a number for each turn of each game.

    The user's function returns, for each game, a number for all turns or a sequence with a number for each.
    Raises UsageError if it cannot be called with games.
    """
    where = f"--advantage-function {name}"
    function = import_function(name, flag="--advantage-function", takes=("games",))

    def advantages(games: Sequence[ScoredGame]) -> list[list[float]]:
        what = f"{where}, question {games[0].trajectory.question.id!r},"
        with user_code(what):
            returned = function(games)
        try:
            return [_of_turns(value, game) for value, game in zip(returned, games, strict=True)]
        except (TypeError, ValueError):
            turns = ", ".join(str(len(game.trajectory.turns)) for game in games)
            raise UsageError(
                f"{what} returned {reprlib.repr(returned)}: return for each game a finite number, or a list "
                f"with one for each of its turns; these games have {turns} turns"
            ) from None

    return advantages


def _of_turns(value: Any, game: ScoredGame) -> list[float]:
    """What a user's function returned for a game, as a finite number for each turn.

    Raises TypeError or ValueError for anything else.
    """
    turns = len(game.trajectory.turns)
    try:
        numbers = [float(number) for number in value]
    except TypeError:  # It is one number for all turns, perhaps a tensor without dimensions.
        numbers = [float(value)] * turns
    if len(numbers) != turns or not all(map(math.isfinite, numbers)):
        raise ValueError(numbers)
    return numbers
