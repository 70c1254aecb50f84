"""What these tasks share: names, seeds, `--data-args`, missing packages."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from prompt_r1.errors import UsageError

REASONING_GYM, TEXTARENA = "reasoning_gym", "textarena"
SPLITS = ("train", "validation", "test")
SIZES = {"train": 1_000, "validation": 100, "test": 200}  # --data-args '{"size": N}' changes the first
SEEDS_OF_A_SPLIT = 1_000_000  # question n of a split has its first seed + n, so no two splits share a seed


@dataclass(frozen=True)
class TaskSplit:
    """The questions of a task to make: `size` of them, with the seeds `seed`, `seed` + 1, …"""

    task: str
    seed: int
    size: int
    args: Mapping[str, Any]  # sizes of the task, for its package


def is_task(name: str) -> bool:
    """Whether a name of --data is a task of another package: `reasoning_gym:TASK` or `textarena:GAME`."""
    package, _, task = name.partition(":")
    return package in (REASONING_GYM, TEXTARENA) and bool(task)


def split_of(task: str, split: str, seed: int, args: str) -> TaskSplit:
    """The part of a task that is for a split of a run with `seed`. Raises UsageError for other `args`."""
    given = parse_data_args(args)
    train_size = given.pop("size", SIZES["train"])
    if not isinstance(train_size, int) or not 0 < train_size <= SEEDS_OF_A_SPLIT:
        raise UsageError(f"--data-args: size must be 1 to {SEEDS_OF_A_SPLIT:,}, not {train_size!r}")
    size = train_size if split == "train" else SIZES[split]
    return TaskSplit(task, (seed * len(SPLITS) + SPLITS.index(split)) * SEEDS_OF_A_SPLIT, size, given)


def parse_data_args(args: str) -> dict[str, Any]:
    """The JSON object of --data-args; without text it is empty. Raises UsageError."""
    try:
        given = json.loads(args or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise UsageError(f'--data-args takes a JSON object such as {{"max_terms": 4}}, not {args!r}')
    return given


def import_package(name: str) -> Any:
    """Import an optional package. Raises UsageError that says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name} cannot be imported ({error}): pip install {name.replace('_', '-')}"
        ) from None


def check_known(package: str, task: str, known: Collection[str]) -> None:
    """Raise UsageError, with the nearest names, for a task that the package does not have."""
    if task not in known:
        near = get_close_matches(task, known, n=3, cutoff=0.3) or sorted(known)[:5]
        raise UsageError(f"{package} has no task {task!r} here; the nearest are {', '.join(near)}")
