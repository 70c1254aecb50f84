"""Write folders that are complete or absent, even if the process is killed while it writes.

    temporary = begin_folder(folder)    # fill it
    complete_folder(folder)             # `folder` is now this one

A kill in between leaves only the temporary folder, which the next writer in the same place removes. If an
older folder has the same name, it is moved aside first; after a kill between the two renames,
`remove_leftovers` moves it back. Damage that comes later is found by a *manifest*, if the folder has one.

These folders have a single writer. `build_folder` is for a cache, which several processes may fill.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from prompt_r1.programs.reading import json_object

TEMPORARY = ".unfinished.tmp"
REPLACED = ".replaced.tmp"  # `agent` is moved aside to `.agent.replaced.tmp`.
MANIFEST = "manifest.json"  # the size in bytes of each file of a folder, by name


def begin_folder(folder: Path) -> Path:
    """Make an empty folder beside `folder`, to be filled and then completed."""
    remove_leftovers(folder.parent)
    # Only the last part of the path is made: if the run folder is deleted during the run, it stays deleted.
    folder.parent.mkdir(exist_ok=True)
    temporary = folder.with_name(TEMPORARY)
    temporary.mkdir()
    return temporary


def complete_folder(folder: Path) -> None:
    """Sync the temporary folder to the disk, and rename it to `folder`, which may exist."""
    temporary = folder.with_name(TEMPORARY)
    for path in sorted(temporary.rglob("*")):
        _sync(path)
    _sync(temporary)
    if folder.exists():
        os.replace(folder, folder.with_name(f".{folder.name}{REPLACED}"))
    os.replace(temporary, folder)
    _sync(folder.parent)
    remove_leftovers(folder.parent)


def remove_leftovers(parent: Path) -> None:
    """Remove incomplete folders in `parent`; if a new folder never came, move the older folder back."""
    for replaced in parent.glob(f".*{REPLACED}"):
        folder = parent / replaced.name.removeprefix(".").removesuffix(REPLACED)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(replaced, folder)
    shutil.rmtree(parent / TEMPORARY, ignore_errors=True)


def is_leftover(name: str) -> bool:
    """Whether a killed writer left the file or folder of this name, which the next writer removes."""
    return name == TEMPORARY or name.endswith(REPLACED)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path) -> None:
    """List the files of a folder in its manifest, with their sizes."""
    (folder / MANIFEST).write_text(json.dumps(_sizes_in(folder), indent=1), "utf-8")


def find_damage(folder: Path) -> str:
    """Say what is wrong with a folder; "" if it has exactly the files and sizes of its manifest.

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
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def build_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a folder under a temporary name beside `folder`, and rename it when it is complete.

    If several processes build the folder at the same time, the first to finish wins. What a killed process
    leaves is not removed, because it looks the same as the folder of a process that is still writing.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as unfinished:
        complete = Path(unfinished, folder.name)
        write(complete)
        try:
            complete.rename(folder)
        except OSError:
            if not folder.exists():  # Otherwise another process was faster.
                raise
