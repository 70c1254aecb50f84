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
    with user_code(f"{where}: cannot import {name!r}: it"):
        return attrgetter(attribute)(import_module(module))


@contextmanager
def user_code(what: str, *, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Inside `with`, an error in a user's own code becomes a UsageError: "`what` raised …".

    Its text is one line, which ends with the user's file and line. Where a library raised the error, this is
    the user's line that called it. UsageError and the errors in `passes` pass unchanged, because the user's
    code may raise them on purpose.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # Anything may go wrong in the user's code.
        if isinstance(error, (UsageError, *passes)):
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
        # Our call of the user's function may be wrong, for example in its number of arguments. Such an error
        # has no line of the user.
        place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        raise UsageError(f"{what} raised {text}{place}") from error


def import_function(
    name: str, *, flag: str, takes: Sequence[str], keywords: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function MODULE:FUNCTION that a flag names.

    `takes` are the names of its positional arguments in the error, and `keywords` are its other arguments.
    """
    function = import_object(name, where=flag)
    try:
        # Any values do: only their number and the names of keywords are checked.
        inspect.signature(function).bind(*takes, **dict.fromkeys(keywords))
    except (TypeError, ValueError):  # ValueError: a function that is written in C may have no signature.
        arguments = ", ".join([*takes, *(f"{keyword}=…" for keyword in keywords)])
        raise UsageError(f"{flag} {name}: it cannot be called as function({arguments})") from None
    return function


def import_reward(name: str) -> OwnReward:
    """The function of --reward: a game and the paper's reward for it → the total of its reward."""
    function = import_function(name, flag="--reward", takes=("game", "paper"))

    def reward(game: Trajectory, paper: Reward) -> float:
        what = f"--reward {name}, question {game.question.id!r},"
        with user_code(what):
            returned = function(game, paper)
        value = _number_of(returned)
        if not math.isfinite(value):
            raise UsageError(f"{what} returned {reprlib.repr(returned)}, not a finite number")
        return value

    return reward


def import_metric(name: str) -> Callable[[str, Question], float]:
    """The function of --metric: an answer and its question → 0 to 1."""
    function = import_function(name, flag="--metric", takes=("answer", "question"))

    def metric(answer: str, question: Question) -> float:
        what = f"--metric {name}, question {question.id!r},"
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
    """The function of --loss-function itself: log-probabilities, columns and settings → a loss.

    What it raises and returns is checked by `loss_of_run` in training/loss_function.py, which needs torch.
    """
    return import_function(
        name, flag="--loss-function", takes=("logprobs", "columns"), keywords=LOSS_SETTINGS
    )


def import_advantages(name: str) -> Callable[[Sequence[ScoredGame]], list[list[float]]]:
    """The function of --advantage-function: the games of a group → a number for each turn of each game.

    The user's function returns, for each game, a number for all turns or a sequence with a number for each.
    """
    function = import_function(name, flag="--advantage-function", takes=("games",))

    def advantages(games: Sequence[ScoredGame]) -> list[list[float]]:
        what = f"--advantage-function {name}, question {games[0].trajectory.question.id!r},"
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
