"""Folders from strangers: follow no link, check numbers.

An archive can hold a link to any file of the user's. Reading it could put a secret into a report or an
exported agent; writing through it would destroy the file. A pipe would block the program forever.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from prompt_r1.errors import UsageError

LARGEST = 1e300  # of a number that is believed: larger integers overflow a float


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value from a file is a number that can be computed with."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST  # type: ignore[operator]


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object of a text; {} for anything else: cut short, nested too deep, or a list."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that appears under its name only when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:  # "x" follows no symbolic link
            file.write(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_no_links(folder: Path, *, skip: Sequence[str] = ()) -> None:
    """Raise UsageError for a link or a special file in a folder, which itself may be a link.

    Folders of it called as in `skip` are not looked into. Without the folder there is nothing to check.
    """
    for entry in _entries(folder, skip):
        if entry.is_symlink():
            raise UsageError(f"{entry.path} is a symbolic link: put the file itself there")
        _check_kind(entry.path, entry.stat(follow_symlinks=False).st_mode)


def make_folder(folder: Path, holds: Callable[[Path], bool], what: str, *, skip: Sequence[str] = ()) -> None:
    """Make the folder of `what`, such as "a run", or find it again.

    Raises UsageError if there are files in it and it does not hold one, if it cannot be made, and for links
    as `check_no_links`.
    """
    try:
        check_no_links(folder, skip=skip)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not holds(folder):
            raise UsageError(
                f"--out {folder}: there are files in it that are not of {what}; give a new or an empty folder"
            )
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}; give a folder that can be written") from None


def _entries(folder: Path, skip: Sequence[str]) -> Iterator["os.DirEntry[str]"]:
    """Everything in a folder and, link by link unfollowed, in its folders."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in skip:
                continue
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path), ())


def _check_kind(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is neither a file nor a folder: remove it")
