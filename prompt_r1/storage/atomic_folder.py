"""Folders that are either complete or absent.

A folder is written under a temporary name, gets a manifest with the checksum of each file, is synced to the
disk and renamed. A kill while it is written leaves only the temporary folder; the manifest detects files that
change later.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MANIFEST = "manifest.json"


class Checksum(NamedTuple):
    """An entry of the manifest, where it is a JSON array."""

    size: int  # bytes
    sha256: str


Checksums = dict[str, Checksum]  # by file name


def new_temporary(folder: Path) -> Path:
    """Make an empty folder beside `folder`, to be filled and then moved to that name."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(exist_ok=True)  # without its parents: a run folder that is gone stays so
    temporary.mkdir()
    return temporary


def remove_leftovers(parent: Path, names: str) -> None:
    """Remove the temporary folders that kills have left; restore a folder that was only moved aside.

    `names` is a regular expression of the names that we write in `parent`: everything else belongs to the
    user and is not touched.
    """
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = re.fullmatch(rf"\.({names})\.(old|tmp)", path.name)
        if match is None:
            continue
        home = path.with_name(match[1])
        if match[2] == "old" and not home.exists():
            os.replace(path, home)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync_and_checksum(folder: Path, names: Iterable[str]) -> Checksums:
    """Sync files to the disk; returns their checksums."""
    found: Checksums = {}
    for name in names:
        with (folder / name).open("rb+") as file:
            size = os.fstat(file.fileno()).st_size
            found[name] = Checksum(size, hashlib.file_digest(file, "sha256").hexdigest())
            os.fsync(file.fileno())
    return found


def seal(temporary: Path, folder: Path, checksums: Checksums) -> None:
    """Write the manifest, and rename the temporary folder to `folder`."""
    (temporary / MANIFEST).write_text(json.dumps(checksums, indent=1), "utf-8")
    sync_and_move(temporary, folder)


def sync_and_move(temporary: Path, folder: Path) -> None:
    """Sync a folder, and rename it to `folder`."""
    for path in sorted(temporary.rglob("*")):
        _sync(path)
    _sync(temporary)
    move_into_place(temporary, folder)
    _sync(folder.parent)


def move_into_place(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`. An existing folder is first moved aside, and removed at the end."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.replace(folder, aside)
    os.replace(temporary, folder)
    shutil.rmtree(aside, ignore_errors=True)


def find_damage(folder: Path, *, share: int = 0, shares: int = 1) -> str:
    """Verify a sealed folder. Returns what is wrong with it, or "".

    With `shares` above 1 only every `shares`-th file is read, starting with number `share`, so that several
    processes can verify a folder together.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_text("utf-8"))
        listed = {name: Checksum(*entry) for name, entry in entries.items()}
        present = {path.name for path in folder.iterdir()} - {MANIFEST}
        different = sorted(present ^ set(listed))
        if different:
            name = different[0]
            return f"{name} is missing" if name in listed else f"{name} does not belong to it"
        for name in sorted(listed)[share::shares]:
            size = (folder / name).stat().st_size
            if size != listed[name].size:
                return f"{name} has {size:,} bytes, not {listed[name].size:,}"
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != listed[name].sha256:
                    return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"its {MANIFEST} is damaged"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return ""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
