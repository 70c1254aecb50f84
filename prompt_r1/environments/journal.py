"""The journal: no call is paid for twice.

It is a file of JSON lines for each rank, which only that rank appends to; all are read at the start. A call
has a line before each of its requests, with what it costs if a kill ends the process there, and one when it
ends: the last line of a call says what it was charged.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from prompt_r1.environments.sources import Outcome
from prompt_r1.programs.files import is_finite_number, json_object
from prompt_r1.types import Message, Spending

EMPTY = vars(Outcome("ok"))  # the fields of an outcome, with values of their types


@dataclass(frozen=True)
class Key:
    """What identifies a call: two calls with the same key share a reply."""

    source: str
    parameters: Mapping[str, object]  # everything but the messages that shapes the reply
    messages: list[Message]
    game: list[object]  # number in its group and epoch, where the environment samples; the question's id

    @cached_property
    def digest(self) -> str:
        parts = [self.source, self.parameters, self.messages, self.game]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Journal:
    """Reads all of `folder` and writes to its rankN.jsonl. Without a folder, nothing is written or found.

    `spent` is what the calls in `folder` cost when it was opened.
    """

    def __init__(self, folder: Path | None, *, rank: int = 0) -> None:
        self.spent = Spending()
        self.records = folder is not None  # whether calls are written
        self.replies: dict[str, Outcome] = {}  # of recorded calls, by the digests of their keys
        self.numbers = count(1)  # of new calls, in the rank's own file
        if folder is None:
            return
        own = folder / f"rank{rank}.jsonl"
        # That file last, so that its replies count: a resumed run gets those that it had.
        for path in sorted(folder.glob("rank*.jsonl"), key=lambda path: path == own):
            charges = self._read(path)
            self.spent += sum(charges.values(), Spending())
            self.numbers = count(max(charges, default=0) + 1)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(own, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # ends a torn last line

    def write(self, call: int, key: Key, charged: Spending, ended: Outcome | None = None) -> None:
        """Append what a call is charged so far and, if it has ended, its outcome.

        It is one write: a kill leaves at most one torn line, the last.
        """
        if not self.records:
            return
        line: dict[str, object] = {"key": key.digest, "call": call, "charged": charged.amounts}
        if ended is not None:
            line |= vars(ended) | {"source": key.source, "prompt": key.messages[-1]["content"]}
            line |= {"time": round(time.time(), 3), "usd": charged.usd}
            if ended.replied:
                self.replies[key.digest] = ended
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def _read(self, path: Path) -> dict[int, Spending]:
        """Remember the replies in a file; what each of its calls was charged. Other lines are skipped."""
        charges = {}
        with path.open("rb") as file:
            for line in map(json_object, file):
                key, call, charged = line.get("key"), line.get("call"), _charge_of(line)
                if not isinstance(key, str) or not isinstance(call, int) or charged is None:
                    continue
                charges[call] = charged
                stored: dict[str, Any] = {name: line.get(name) for name in EMPTY}
                fits = all(type(stored[name]) is type(value) for name, value in EMPTY.items())
                if fits and (outcome := Outcome(**stored)).replied:
                    self.replies[key] = outcome
        return charges


def _charge_of(line: Mapping[str, Any]) -> Spending | None:
    """What a call was charged up to a line; None if the line does not say so."""
    amounts = line.get("charged")
    if not isinstance(amounts, list) or len(amounts) != len(Spending().amounts):
        return None
    fits = all(is_finite_number(amount) and amount >= 0 for amount in amounts)
    return Spending(*amounts) if fits else None
