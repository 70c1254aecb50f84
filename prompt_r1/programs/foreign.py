"""What others may have written: read what is sound of it, overwrite nothing of theirs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from prompt_r1.errors import UsageError

LFS_POINTER = b"version https://git-lfs"  # how a file begins that Git LFS has not fetched
LFS_ADVICE = "a pointer of Git LFS: `git lfs pull` fetches the file itself"
LARGEST = 1e300  # of a number that is believed: larger integers overflow a float


def launched(name: str, default: int) -> int:
    """A number in a variable of the launcher. Raises UsageError."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} is {text!r}, not a number: unset it")
    return int(text)


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
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    finally:
        partial.unlink(missing_ok=True)


def make_folder(folder: Path, holds: Callable[[Path], bool], what: str) -> None:
    """Make the folder of `what`, such as "a run", or find it again.

    Raises UsageError if there are files in it and it does not hold one, and if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not holds(folder):
            raise UsageError(
                f"--out {folder}: there are files in it that are not of {what}; give a new or an empty folder"
            )
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}; give a folder that can be written") from None
