"""Files and folders: read what is sound of them, write them whole or not at all.

A folder is written under a temporary name, synced to the disk and renamed. A kill while it is written leaves
only the temporary folder, which the next writer beside it removes. An older folder of the same name is moved
aside first: after a kill between the two renames, `remove_leftovers` moves it back.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from prompt_r1.errors import UsageError

LFS_POINTER = b"version https://git-lfs"  # how a file begins that Git LFS has not fetched
LFS_ADVICE = "a pointer of Git LFS: `git lfs pull` fetches the file itself"
LARGEST = 1e300  # of a number that is believed: larger integers overflow a float
TEMPORARY = ".unfinished.tmp"
MANIFEST = "manifest.json"  # {name: [bytes, SHA-256]}


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


def new_temporary(folder: Path) -> Path:
    """Make an empty folder beside `folder`, to be filled and then moved to that name."""
    remove_leftovers(folder.parent)
    folder.parent.mkdir(exist_ok=True)  # without its parents: a run folder that is gone stays so
    temporary = folder.with_name(TEMPORARY)
    temporary.mkdir()
    return temporary


def seal(temporary: Path, folder: Path) -> None:
    """Write the checksums of all files, and move the temporary folder to `folder`."""
    checksums = {path.name: checksum(path) for path in sorted(temporary.iterdir())}
    (temporary / MANIFEST).write_text(json.dumps(checksums, indent=1), "utf-8")
    sync_and_move(temporary, folder)


def sync_and_move(temporary: Path, folder: Path) -> None:
    """Sync a folder, and rename it to `folder`, which may exist."""
    for path in (*sorted(temporary.rglob("*")), temporary):
        _sync(path)
    if folder.exists():
        os.replace(folder, folder.with_name(f".{folder.name}.old"))
    os.replace(temporary, folder)
    remove_leftovers(folder.parent)
    _sync(folder.parent)


def remove_leftovers(parent: Path) -> None:
    """Remove what a kill or a full disk has left of a folder in `parent`; move an older one back."""
    for replaced in parent.glob(".*.old"):
        folder = parent / replaced.name[1:-4]
        if not folder.exists():
            os.replace(replaced, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(parent / TEMPORARY, ignore_errors=True)


def find_damage(folder: Path, *, only: Sequence[str] = ()) -> str:
    """Verify a sealed folder, or `only` some of its files. Returns what is wrong with it, or ""."""
    try:
        written = json_object((folder / MANIFEST).read_bytes())
        there = only or [path.name for path in folder.iterdir() if path.name != MANIFEST]
        found = {name: checksum(folder / name) for name in there}
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    changed = [name for name in only or written.keys() | found.keys() if written.get(name) != found.get(name)]
    return f"{min(changed)} has changed since it was written" if changed else ""


def checksum(path: Path) -> list[int | str]:
    """The bytes and the SHA-256 of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
