"""Progress bars that are also readable in a log file."""

import io
import sys
from typing import Any


class _Lines(io.TextIOBase):
    """Writes each state of a progress bar on a new line, because a log file shows no carriage return."""

    def write(self, text: str) -> int:
        line = text.strip("\r\n ")
        if line:
            print(line, file=sys.stderr, flush=True)
        return len(text)


def progress_style() -> dict[str, Any]:
    """Arguments of tqdm. The last state of a bar stays, so that a wait ends at 100 %.

    Without a terminal, a line is written after every ten seconds; a shorter wait writes none.
    """
    if sys.stderr.isatty():
        return {}
    return {"file": _Lines(), "mininterval": 10, "delay": 10}
