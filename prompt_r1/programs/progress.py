"""Progress bars that are also readable in a log file."""

import io
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


class _Lines(io.TextIOBase):
    """Writes each state of a progress bar on a new line, because a log file shows no carriage return."""

    def write(self, text: str) -> int:
        line = text.strip("\r\n ")
        if line:
            with suppress(BrokenPipeError):  # If nobody reads stderr any more, the work goes on.
                print(line, file=sys.stderr, flush=True)
        return len(text)


def progress_bar(
    items: Iterable[T] | None = None,
    *,
    name: str,
    unit: str = "it",
    total: int | None = None,
    shown: bool = True,
) -> "tqdm[T]":
    """A progress bar over `items`, or to be updated up to `total`. Its last state stays, so it ends at 100 %.

    Without a terminal, a line is written every ten seconds. Work of less than ten seconds writes none.
    """
    is_terminal = sys.stderr.isatty()
    return tqdm(
        items,
        desc=name,
        unit=unit,
        total=total,
        disable=not shown,
        file=None if is_terminal else _Lines(),  # None: stderr
        mininterval=0.1 if is_terminal else 10,
        delay=0 if is_terminal else 10,
    )
