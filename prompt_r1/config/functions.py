"""Functions and objects that a user names as MODULE:NAME."""

import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError

Metric = Callable[[str, Sequence[str]], float]
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
    return found


def import_metric(name: str) -> Metric:
    """The metric of answers called MODULE:FUNCTION. Raises UsageError if it cannot be imported."""
    function = import_object(name, where="--answer-metric")
    if not callable(function):
        raise UsageError(f"--answer-metric {name}: not a function")

    def metric(prediction: str, answers: Sequence[str]) -> float:
        value = float(function(prediction, answers))
        if not math.isfinite(value) or not 0 <= value <= 1:
            raise UsageError(f"--answer-metric {name} returned {value} for {prediction!r}, not 0 to 1")
        return value

    return metric
