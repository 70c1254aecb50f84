"""Folders that are either whole or not there: written beside their name, listed with sums, synced, renamed.

A kill in the middle of writing leaves a folder under a temporary name; a byte that changes later is found by
its sum. Formats alone find neither.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

NAME = "manifest.json"

Sums = dict[str, list[int | str]]  # file name → [bytes, sha256]


def fresh(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled and then moved to its name."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def sweep(parent: Path) -> None:
    """Remove what kills have left in a folder; an older folder that was only moved aside comes back."""
    for path in parent.glob(".*.old"):
        home = path.with_name(path.name[1:].removesuffix(".old"))
        if home.exists():
            shutil.rmtree(path)
        else:
            os.replace(path, home)
    for path in parent.glob(".*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def sums(folder: Path, names: Iterable[str]) -> Sums:
    """Size and sha256 of files, which are on the disk when this returns."""
    found: Sums = {}
    for name in names:
        with (folder / name).open("rb+") as file:
            found[name] = [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]
            os.fsync(file.fileno())
    return found


def seal(temporary: Path, folder: Path, listed: Sums) -> None:
    """Write the manifest, sync, and give the folder its name."""
    (temporary / NAME).write_text(json.dumps(listed, indent=1), "utf-8")
    sums(temporary, [NAME])
    _sync(temporary)
    commit(temporary, folder)
    _sync(folder.parent)


def commit(temporary: Path, folder: Path) -> None:
    """Move to the final name; an older folder of that name is moved aside first, then removed."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.replace(folder, aside)
    os.replace(temporary, folder)
    shutil.rmtree(aside, ignore_errors=True)


def fault(folder: Path, *, share: int = 0, shares: int = 1) -> str:
    """What is wrong with a sealed folder, in a few words; "" if nothing is.

    Several processes may each read their share of the files.
    """
    try:
        listed: Sums = json.loads((folder / NAME).read_text("utf-8"))
        present = {path.name for path in folder.iterdir()} - {NAME}
        if present != set(listed):
            odd = sorted(present ^ set(listed))[0]
            return f"{odd} is missing" if odd in listed else f"{odd} does not belong to it"
        for name in sorted(listed)[share::shares]:
            size, digest = listed[name]
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size:,} bytes, not {size:,}"
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"it has no {NAME}"
    except (ValueError, TypeError, AttributeError):
        return f"its {NAME} is cut short"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return ""


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
