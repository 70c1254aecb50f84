"""Write lines and files that are complete or absent; make and lock the folder of a run."""

import fcntl
import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO

from prompt_r1.errors import UsageError

logger = logging.getLogger(__name__)


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


def append_line(file: int, line: str) -> int:
    """Append a line to a file descriptor that was opened with O_RDWR | O_APPEND. Returns where it begins.

    A disk that is full for a moment writes a part of a line and raises nothing; the rest is then written by
    another call. If that raises, or the process is killed, the file ends within a line. Then the next call
    writes a line break first, so that only the incomplete line is lost. Raises OSError.
    """
    size = os.fstat(file).st_size
    ends_within_line = size > 0 and os.pread(file, 1, size - 1) != b"\n"
    begin = size
    rest = line.encode() + b"\n"
    if ends_within_line:
        begin += 1
        rest = b"\n" + rest
    while rest:
        written = os.write(file, rest)
        rest = rest[written:]
    return begin


def make_folder(folder: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Make the folder of --out, or accept an existing folder that is empty or `is_ours`.

    Raises UsageError if the folder has other files, or if it cannot be made. `what` completes the error:
    "there are files in it that are not of a run".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not is_ours(folder):
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


def file_name(text: str) -> str:
    """A text as the name of a file. Other texts have other names."""
    name = re.sub(r"[^\w.-]+", "-", text)
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
