"""Lines, files and folders that are written whole or not at all, damage in them, and locks."""

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prompt_r1.programs import folders
from prompt_r1.programs.files import append_line, lock, replace_file
from prompt_r1.programs.folders import (
    begin_folder,
    build_folder,
    complete_folder,
    find_damage,
    remove_leftovers,
    write_manifest,
)
from prompt_r1.programs.reading import json_object
from tests.support.paths import ROOT

MOVED_AGENT = f".agent{folders.REPLACED}"


def write_folder(folder: Path, text: str) -> None:
    """Write a folder of two files and their manifest."""
    temporary = begin_folder(folder)
    (temporary / "a.txt").write_text(text)
    (temporary / "b.txt").write_text(text)
    write_manifest(temporary)
    complete_folder(folder)


def test_a_folder_of_a_cache_that_cannot_be_renamed_is_an_error_unless_another_process_made_it(tmp_path):
    """Every error of the rename was taken for a faster process, so the caller got no folder."""
    (tmp_path / "faster").mkdir()
    (tmp_path / "faster" / "file").touch()
    build_folder(tmp_path / "faster", Path.mkdir)
    assert (tmp_path / "faster" / "file").exists()
    with pytest.raises(FileNotFoundError):
        build_folder(tmp_path / "missing", lambda unfinished: None)


def test_an_interrupted_build_leaves_nothing_in_the_cache(tmp_path):
    def interrupted(folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_folder(tmp_path / "cache" / "agent", interrupted)
    assert list((tmp_path / "cache").iterdir()) == []
    build_folder(tmp_path / "cache" / "agent", Path.mkdir)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["agent"]
    assert (tmp_path / "cache" / "agent").stat().st_mode & 0o777 == 0o755


def test_a_manifest_lists_the_files_and_their_sizes(tmp_path):
    write_folder(tmp_path / "agent", "four")
    listed = json.loads((tmp_path / "agent" / folders.MANIFEST).read_text())
    assert listed == {"a.txt": 4, "b.txt": 4} and find_damage(tmp_path / "agent") == ""


def test_a_file_that_is_cut_short_missing_or_added_is_damage(tmp_path):
    folder = tmp_path / "agent"
    write_folder(folder, "four")
    (folder / "b.txt").write_text("fou")
    assert find_damage(folder) == "b.txt has another size than was written"
    (folder / "b.txt").unlink()
    assert find_damage(folder) == "b.txt has another size than was written"
    (folder / "b.txt").write_text("four")
    (folder / "c.txt").touch()
    assert find_damage(folder) == "c.txt has another size than was written"


@pytest.mark.parametrize("content", ["", "[]", '{"a.txt": 4', "{}"])
def test_a_damaged_list_of_files_is_damage(content, tmp_path):
    write_folder(tmp_path / "agent", "four")
    (tmp_path / "agent" / folders.MANIFEST).write_text(content)
    assert find_damage(tmp_path / "agent") == "manifest.json is incomplete"


def test_replacing_a_folder_leaves_nothing_of_the_older_one(tmp_path):
    folder = tmp_path / "agent"
    write_folder(folder, "older")
    for left in (folders.TEMPORARY, MOVED_AGENT):  # by kills
        (tmp_path / left).mkdir()
        (tmp_path / left / "torn.txt").touch()
    write_folder(folder, "newer")
    assert find_damage(folder) == "" and (folder / "a.txt").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]


class Killed(BaseException):
    """The process is killed."""


def test_a_folder_that_is_replaced_is_complete_at_whatever_moment_the_process_is_killed(
    tmp_path, monkeypatch
):
    """It is the older or the newer one, after the next start has removed what the kill left."""
    for moment in itertools.count():
        folder = tmp_path / str(moment) / "agent"
        write_folder(folder, "older")
        with monkeypatch.context() as patched:
            kill_before_call(moment, patched)
            try:
                write_folder(folder, "newer")
                is_killed = False
            except Killed:
                is_killed = True
        remove_leftovers(folder.parent)
        assert [path.name for path in folder.parent.iterdir()] == ["agent"]
        assert find_damage(folder) == ""
        assert {path.read_text() for path in folder.glob("*.txt")} in ({"older"}, {"newer"})
        if not is_killed:
            break
    assert moment > 5, "files are synced, and folders renamed"
    assert (folder / "a.txt").read_text() == "newer"


def kill_before_call(moment: int, patched: pytest.MonkeyPatch) -> None:
    """Kill the process when it syncs, renames or removes for the `moment`-th time, counted from 0."""
    calls = itertools.count()
    for module, name in [(os, "fsync"), (os, "replace"), (shutil, "rmtree")]:
        function = getattr(module, name)

        def counted(*arguments: object, function=function, **options: object) -> None:
            if next(calls) == moment:
                raise Killed
            function(*arguments, **options)

        patched.setattr(module, name, counted)


def test_a_hidden_folder_of_the_users_beside_ours_is_neither_renamed_nor_removed(tmp_path):
    """Any hidden name that ended with .old was taken for a folder of ours: `.notes.old` became `notes`."""
    for name in (".notes.old", ".agent.old"):
        (tmp_path / name).mkdir()
    write_folder(tmp_path / "agent", "new")
    assert {path.name for path in tmp_path.iterdir()} == {".notes.old", ".agent.old", "agent"}


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"a": 1', "[" * 100_000, b"\xff", '{"a": ' * 5_000])
def test_a_text_that_holds_no_json_object_is_read_as_an_empty_one(text):
    assert json_object(text) == {}
    assert json_object('{"a": 1}') == {"a": 1}


def test_a_file_that_cannot_be_written_is_called_by_its_own_name(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        replace_file(tmp_path / "none/report.html", b"")
    assert error.value.filename == str(tmp_path / "none/report.html")


def test_a_file_that_cannot_be_replaced_leaves_no_partial_file(tmp_path):
    """On a full disk, it would keep the space that it took."""
    (tmp_path / "report.html").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "report.html", b"a long page")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_lock_is_held_until_its_file_is_closed(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        assert lock(first, path)
        assert not lock(second, path)
        first.close()
        assert lock(second, path)


HOLD = """
import sys, time
from pathlib import Path
from prompt_r1.programs.files import lock
path = Path(sys.argv[1])
with path.open("w") as file:
    print(lock(file, path), flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_process_that_is_killed_is_free_again(tmp_path):
    path = tmp_path / "lock"
    line = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        with path.open("w") as file:
            assert not lock(file, path)
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert lock(file, path)


def test_a_file_system_without_locks_is_warned_of_once_and_used_without(tmp_path, monkeypatch, caplog):
    """ENOLCK ended evaluations with "this is a bug"."""

    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "lock"
    with path.open("w") as file:
        assert lock(file, path) and lock(file, path)
    [warning] = caplog.messages
    assert str(path) in warning and "No locks available" in warning


@pytest.fixture
def file(tmp_path):
    descriptor = os.open(tmp_path / "lines", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def content_of(file: int) -> bytes:
    return os.pread(file, 10_000, 0)


def test_a_line_that_is_written_in_parts_is_completed(file, monkeypatch):
    """A disk that was full for a moment wrote half a line without an error; the next one was glued to it."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:3]))
    assert append_line(file, "first line") == 0
    assert append_line(file, "second") == len("first line\n")
    assert content_of(file) == b"first line\nsecond\n"


def test_a_line_after_an_incomplete_one_begins_on_a_line_of_its_own(file, monkeypatch):
    write = os.write

    def fill_disk(file: int, content: bytes) -> int:
        if len(content) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:4])

    with monkeypatch.context() as full:
        full.setattr(os, "write", fill_disk)
        with pytest.raises(OSError, match="No space left"):
            append_line(file, "0123456789")
    assert append_line(file, "next") == len("0123\n")
    assert content_of(file) == b"0123\nnext\n"
