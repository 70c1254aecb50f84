"""The journal: no call is paid for twice.

It is a file of JSON lines for each rank, which only that rank appends to; all are read at the start. A call
has a line before each of its requests, with what it costs if a kill ends the process there, and one after it:
the last line of a call says what it was charged. A line with a `reply` answers the call for ever.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from prompt_r1.environments.sources import Caller, Reply, Source
from prompt_r1.errors import UsageError
from prompt_r1.programs.files import json_object
from prompt_r1.programs.lines import append_line
from prompt_r1.types import Message, Spending

LARGEST_AMOUNT = 1e15  # calls, tokens or dollars of one call that can be right: above, sums lose precision
COLUMNS = len(Spending().amounts)
EMPTY = asdict(Reply(""))  # the fields of a reply, with values of their types


def call_key(source: Source, messages: Sequence[Message], caller: Caller) -> str:
    """Identifies a call: two calls with the same key share a reply.

    Where the source samples, each game of each occurrence of a question makes calls of its own.
    """
    asked_by: list[object] = []
    if source.samples:
        asked_by = [caller.question, caller.sample, caller.epoch]
    elif source.by_question:
        asked_by = [caller.question]
    parts = [source.name, source.parameters, messages, asked_by]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Journal:
    """Reads all of `folder` and writes to its rankN.jsonl. Without a folder, nothing is written or found.

    `spent` is what the calls in `folder` cost when it was opened. Raises UsageError for a file that we have
    not written.
    """

    def __init__(self, folder: Path | None, *, rank: int = 0) -> None:
        self.spent = Spending()
        self.records = folder is not None  # whether calls are written
        self.replies: dict[str, Reply] = {}  # of recorded calls, by their keys
        self.numbers = count(1)  # of new calls, in the rank's own file
        if folder is None:
            return
        own = folder / f"rank{rank}.jsonl"
        # The own file last, so that its replies count: a resumed run gets those that it had.
        for path in sorted(folder.glob("rank*.jsonl"), key=lambda path: path == own):
            charges = self._read(path)
            self.spent += sum(charges.values(), Spending())
            self.numbers = count(max(charges, default=0) + 1)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(own, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)

    def write(
        self, call: int, key: str, charged: Spending, reply: Reply | None = None, **shown: object
    ) -> None:
        """Append what a call is charged so far and its reply; `shown` is for people who read the file."""
        if not self.records:
            return
        line: dict[str, object] = {"key": key, "call": call, "charged": charged.amounts}
        if reply is not None:
            self.replies[key] = reply
            line |= {"reply": asdict(reply), "time": round(time.time(), 3), "usd": charged.usd, **shown}
        append_line(self._file, json.dumps(line))

    def _read(self, path: Path) -> dict[int, Spending]:
        """Remember the replies in a file; what each of its calls was charged.

        A kill leaves torn lines, which are no JSON: they are skipped.
        """
        charges = {}
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if line := json_object(text):
                    try:
                        key, call, charged, reply = _values_of(line)
                    except ValueError as error:
                        raise UsageError(f"{path}, line {number}: {error}; give another --out") from None
                    charges[call] = charged
                    if reply is not None:
                        self.replies[key] = reply
        return charges


def _values_of(line: Mapping[str, Any]) -> tuple[str, int, Spending, Reply | None]:
    """The key of a call, its number, what it was charged, and its reply. Raises ValueError."""
    if "verdict" in line:
        raise ValueError("the journal was written by an older version")
    key, call, charged, reply = (line.get(name) for name in ("key", "call", "charged", "reply"))
    if not isinstance(key, str) or not _is_amount(call) or not isinstance(call, int):
        raise ValueError("this is no call of a journal")
    if not isinstance(charged, list) or len(charged) != COLUMNS or not all(map(_is_amount, charged)):
        raise ValueError(f"charged must be {COLUMNS} amounts from 0, not {charged!r:.99}")
    if reply is None:
        return key, call, Spending(*charged), None
    fits = isinstance(reply, dict) and reply.keys() == EMPTY.keys()
    if not fits or any(type(reply[name]) is not type(value) for name, value in EMPTY.items()):
        raise ValueError(f"a reply has the fields {', '.join(EMPTY)}, with their types")
    if not _is_amount(reply["tokens_in"]) or not _is_amount(reply["tokens_out"]):
        raise ValueError("tokens_in and tokens_out must be numbers from 0")
    return key, call, Spending(*charged), Reply(**reply)


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST_AMOUNT  # type: ignore[operator]
