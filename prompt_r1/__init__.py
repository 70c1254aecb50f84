"""Prompt-R1: a small agent learns by reinforcement to question a large language model (arXiv 2511.01016).

    import prompt_r1

    with prompt_r1.load("runs/mini-seed0") as pair:
        print(pair.ask("Who is the mother of the director of Silent Valley?").answer)

The names of `_HOMES` are imported on first use: torch takes seconds.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from prompt_r1.errors import EnvError, FatalEnvError, UsageError
from prompt_r1.programs.installation import check_installation

__version__ = "0.3.0"

if sys.argv[:1] == ["-m"]:  # `python -m prompt_r1.…` imports this file before its own
    check_installation()

if TYPE_CHECKING:
    from prompt_r1.pair.api import Pair as Pair
    from prompt_r1.pair.api import load as load
    from prompt_r1.pair.dialogue import Piece as Piece
    from prompt_r1.pair.playing import LimitReached as LimitReached
    from prompt_r1.pair.playing import Limits as Limits
    from prompt_r1.types import Trajectory as Trajectory

_HOMES = {
    "LimitReached": "pair.playing",
    "Limits": "pair.playing",
    "Pair": "pair.api",
    "Piece": "pair.dialogue",
    "load": "pair.api",
    "Trajectory": "types",
}
__all__ = ["EnvError", "FatalEnvError", "UsageError", "__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> "list[str]":  # quoted: an old Python must reach `check_installation`
    return sorted([*globals(), *_HOMES])
