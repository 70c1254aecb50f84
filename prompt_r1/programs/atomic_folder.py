"""Folders that are either complete or absent.

A folder is written under a temporary name, synced to the disk and renamed. A kill while it is written leaves
only the temporary folder, which the next writer beside it removes. An older folder of the same name is moved
aside first: after a kill between the two renames, `remove_leftovers` moves it back.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from prompt_r1.programs.foreign import json_object

TEMPORARY = ".unfinished.tmp"
MANIFEST = "manifest.json"  # {name: [bytes, SHA-256]}


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
