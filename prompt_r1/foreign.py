"""Folders from strangers: follow no link, check numbers.

An archive can hold a link to any file of the user's. Reading it could put a secret into a report or an
exported agent; writing through it would destroy the file. A pipe would block the program forever.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from prompt_r1.errors import UsageError

SAFETENSORS = re.compile(r"[\w-][\w.-]*\.safetensors")
LARGEST_INDEX = 100_000_000  # bytes; that of a model of a trillion weights has 10 million
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


def check_links_stay_inside(folder: Path, others: Sequence[Path] = ()) -> None:
    """Raise UsageError for a special file in a folder, and a link to anything outside it and `others`."""
    homes = [home.resolve() for home in (folder, *others)]
    for entry in _entries(folder, ()):
        target = Path(entry.path).resolve()
        if not target.exists():
            continue  # a link to nothing: whoever needs the file says that it is missing
        if entry.is_symlink() and not any(target.is_relative_to(home) for home in homes):
            raise UsageError(f"{entry.path} is a link to {target}, outside its folder: put the file there")
        _check_kind(entry.path, target.stat().st_mode)


def check_weight_index(folder: Path) -> None:
    """Raise UsageError for an index of a model's weights that names anything but safetensors files beside it.

    transformers would read a path that leaves the folder, and unpickle a file of another format.
    """
    for path in folder.glob("*.safetensors.index.json"):
        fits = path.stat().st_size <= LARGEST_INDEX
        files = json_object(path.read_bytes()).get("weight_map") if fits else None
        if not isinstance(files, dict) or not files:
            raise UsageError(f"{path} is not an index of weights: download the model again")
        for file in files.values():
            if not isinstance(file, str) or not SAFETENSORS.fullmatch(file):
                raise UsageError(
                    f"{path} names {str(file)[:80]!r}: an index may name only .safetensors files beside it"
                )


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
