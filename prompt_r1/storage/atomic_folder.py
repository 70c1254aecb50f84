"""Folders that are either complete or absent.

A folder is written under a temporary name, gets one file with the checksums of the others, is synced to the
disk and renamed. A kill while it is written leaves only the temporary folder.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from prompt_r1.foreign import json_object

MANIFEST = "manifest.json"  # {name: [bytes, SHA-256]}


def new_temporary(folder: Path) -> Path:
    """Make an empty folder beside `folder`, to be filled and then moved to that name."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(exist_ok=True)  # without its parents: a run folder that is gone stays so
    temporary.mkdir()
    return temporary


def seal(temporary: Path, folder: Path) -> None:
    """Write the checksums of all files, sync them, and rename the temporary folder to `folder`."""
    checksums = {path.name: _checksum(path) for path in sorted(temporary.iterdir())}
    (temporary / MANIFEST).write_text(json.dumps(checksums, indent=1), "utf-8")
    sync_and_move(temporary, folder)


def sync_and_move(temporary: Path, folder: Path) -> None:
    """Sync a folder, and rename it to `folder`. An existing one is moved aside first, and removed last."""
    for path in (*sorted(temporary.rglob("*")), temporary):
        _sync(path)
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.replace(folder, aside)
    os.replace(temporary, folder)
    shutil.rmtree(aside, ignore_errors=True)
    _sync(folder.parent)


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


def find_damage(folder: Path) -> str:
    """Verify a sealed folder. Returns what is wrong with it, or ""."""
    try:
        written = json_object((folder / MANIFEST).read_bytes())
        found = {path.name: _checksum(path) for path in folder.iterdir() if path.name != MANIFEST}
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    changed = [name for name in written.keys() | found.keys() if written.get(name) != found.get(name)]
    return f"{min(changed)} has changed since it was written" if changed else ""


def _checksum(path: Path) -> list[int | str]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
