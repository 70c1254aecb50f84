"""Read what others wrote only where it is sound; write lines, files and folders that are complete or absent.

A folder is written under a temporary name, synced to the disk and renamed when it is complete. A kill while
it is written leaves only the temporary folder, which the next writer beside it removes. If an older folder
has the same name, it is moved aside first; after a kill between the two renames, `remove_leftovers` moves it
back.
"""

import fcntl
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, TypeGuard, get_origin

from prompt_r1.errors import UsageError

logger = logging.getLogger(__name__)

LFS_POINTER = b"version https://git-lfs"  # the first bytes of a file that Git LFS has not fetched
LFS_ADVICE = "a pointer of Git LFS: `git lfs pull` fetches the file itself"
MAX_AMOUNT = 1e15  # Above, sums of tokens would lose precision.
MAX_NUMBER = 1e300  # A larger integer may overflow a float.
TEMPORARY = ".unfinished.tmp"
MANIFEST = "manifest.json"  # the size in bytes of each file of a sealed folder, by name


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value from a file is a number that can be computed with."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]


def check_values(read: object) -> None:
    """Raise ValueError if a dataclass that was made from a file holds values of other types than its fields.

    No number in our files is below -1 or above MAX_AMOUNT.
    """
    for one in fields(read):  # type: ignore[arg-type]
        value = getattr(read, one.name)
        kind = get_origin(one.type) or one.type
        if kind in (int, float):
            is_right = type(value) in (int, kind) and -1 <= value <= MAX_AMOUNT
        elif kind is dict:  # metrics, which may be NaN
            is_right = type(value) is dict and all(
                isinstance(number, float) or is_finite_number(number) for number in value.values()
            )
        else:
            is_right = type(value) is kind
        if not is_right:
            raise ValueError(f"{one.name} is {value!r:.50}")


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Anything else, such as a list or a text that was cut short, gives {}."""
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
        with partial.open("xb") as file:  # The mode "x" follows no symbolic link.
            file.write(content)
        os.replace(partial, path)
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    finally:
        partial.unlink(missing_ok=True)


def append_line(file: int, line: str) -> None:
    """Append a line to a file descriptor that was opened with O_RDWR | O_APPEND.

    A disk that is full for a moment writes a part of a line and raises nothing; the rest is then written by
    another call. If that raises, or the process is killed, the file ends within a line. The next line then
    begins after a line break, so that only the incomplete line is lost. Raises OSError.
    """
    size = os.fstat(file).st_size
    ends_within_line = size > 0 and os.pread(file, 1, size - 1) != b"\n"
    rest = line.encode() + b"\n"
    if ends_within_line:
        rest = b"\n" + rest
    while rest:
        written = os.write(file, rest)
        rest = rest[written:]


def make_folder(folder: Path, holds: Callable[[Path], bool], what: str) -> None:
    """Make the folder of `what` (such as "a run"), or accept a folder that `holds` recognises as such.

    Raises UsageError if the folder has other files, or if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not holds(folder):
            raise UsageError(
                f"{folder}: there are files in it that are not of {what}; give --out a new or an empty folder"
            )
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; give --out a folder that can be written") from None


def lock(file: int | IO[str], path: Path) -> bool:
    """Lock the open file of `path` until it is closed. Returns False if another process holds its lock.

    However a process ends, the system frees its locks, so a lock is never stale. If the file system has no
    locks, as some network file systems, the function warns, and returns True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EACCES of some network file systems means the same.
        return False
    except OSError as error:
        _warn_of_missing_locks(path, error.strerror)
    return True


@functools.cache  # The warning comes once for each folder, however often the lock is tried.
def _warn_of_missing_locks(path: Path, reason: str) -> None:
    logger.warning("%s cannot be locked (%s): let no second process write to this folder", path, reason)


def new_temporary(folder: Path) -> Path:
    """Make an empty folder beside `folder`, to be filled and then moved to that name."""
    remove_leftovers(folder.parent)
    # Only the last part of the path is made: if the run folder is deleted during the run, it stays deleted.
    folder.parent.mkdir(exist_ok=True)
    temporary = folder.with_name(TEMPORARY)
    temporary.mkdir()
    return temporary


def seal(temporary: Path, folder: Path) -> None:
    """Write the manifest of a temporary folder, and move it to `folder`."""
    sizes = _sizes_in(temporary)
    (temporary / MANIFEST).write_text(json.dumps(sizes, indent=1), "utf-8")
    sync_and_move(temporary, folder)


def find_damage(folder: Path) -> str:
    """Say what is wrong with a sealed folder; "" if it has exactly the files and sizes of its manifest.

    This notices files that are cut short, missing or added. It does not notice changed bytes.
    """
    try:
        listed = json_object((folder / MANIFEST).read_bytes())
        sizes = _sizes_in(folder)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not listed:
        return f"{MANIFEST} is incomplete"
    for name in sorted(listed.keys() | sizes.keys()):
        if listed.get(name) != sizes.get(name):
            return f"{name} has another size than was written"
    return ""


def _sizes_in(folder: Path) -> dict[str, int]:
    """The size in bytes of each file of a folder, by name, without the manifest."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    sizes.pop(MANIFEST, None)
    return sizes


def sync_and_move(temporary: Path, folder: Path) -> None:
    """Sync a folder to the disk, and rename it to `folder`, which may exist."""
    for path in sorted(temporary.rglob("*")):
        _sync(path)
    _sync(temporary)
    if folder.exists():
        os.replace(folder, folder.with_name(f".{folder.name}.old"))
    os.replace(temporary, folder)
    remove_leftovers(folder.parent)
    _sync(folder.parent)


def remove_leftovers(parent: Path) -> None:
    """Remove incomplete folders in `parent`; if a new folder never came, move the older folder back."""
    for replaced in parent.glob(".*.old"):
        folder = parent / replaced.name.removeprefix(".").removesuffix(".old")
        if folder.exists():
            _remove(replaced)
        else:
            os.replace(replaced, folder)
    _remove(parent / TEMPORARY)


def _remove(path: Path) -> None:
    """Remove a folder, or the file or link that stands in its place in a run folder from elsewhere."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
