"""Lines are whole, also on a disk that is full for a moment."""

import errno
import os

import pytest

from prompt_r1.programs.lines import append_line


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
    append_line(file, "first line")
    append_line(file, "second")
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
    append_line(file, "next")
    assert content_of(file) == b"0123\nnext\n"
