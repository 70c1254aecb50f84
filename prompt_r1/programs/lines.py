"""Append whole lines to a file that must survive a kill and a full disk."""

import os


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
