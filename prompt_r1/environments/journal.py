"""The journal: no call is paid for twice.

    live    every call is sent, and written
    reuse   a call whose reply is in the journal is not sent again
    replay  nothing is sent; a call without a reply in the journal is an error

It is a file of JSON lines for each rank, which only that rank appends to; all are read at the start. A call
has a line before each of its requests, with what it costs if a kill ends the process there, and one when it
ends: the last line of a call says what it was charged.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prompt_r1.environments.sources import Outcome
from prompt_r1.errors import UsageError
from prompt_r1.foreign import check_no_links, is_finite_number, json_object
from prompt_r1.spending import Spending
from prompt_r1.types import Message

STORED = ("verdict", "text", "label", "reason", "reasoning", "finish", "tokens_in", "tokens_out")
EMPTY = Outcome("ok")  # its fields have the types of stored ones
REPLIED = ("ok", "outcome")  # the verdicts of calls that are not sent again
FAILED = ("failed", "refused", "fatal")  # those that only a replay repeats


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
    """Writes to `folder`/rankN.jsonl. Reads all of `folder` and, for replies only, the journals in `others`.

    `spent` is what the calls in `folder` cost when it was opened. Without a folder nothing is written.
    """

    def __init__(
        self, folder: Path | None, *, mode: str = "reuse", rank: int = 0, others: Iterable[Path] = ()
    ) -> None:
        self.mode = mode
        self.spent = Spending()
        self._replies: dict[str, Outcome] = {}  # by digest
        self._failures: dict[str, Outcome] = {}
        for other in others:
            check_no_links(other)
            paths = sorted(other.rglob("rank*.jsonl")) if other.is_dir() else [other]
            if not paths or not paths[0].exists():
                raise UsageError(f"--journal-from {other}: there is no journal")
            for path in paths:
                self._read(path)
        own = folder / f"rank{rank}.jsonl" if folder else None
        self._calls = 0  # in the rank's own file
        # That file last, so that its replies count: a resumed run gets those that it had.
        for path in sorted(folder.glob("rank*.jsonl"), key=lambda path: path == own) if folder else []:
            charges = self._read(path)
            self.spent += sum(charges.values(), Spending())
            self._calls = max(charges, default=0)
        self._file = _open_to_append(own) if own and mode != "replay" else -1
        self.reuses = mode != "live" and (self._file >= 0 or bool(self._replies))
        if mode == "replay" and not self._replies:
            raise UsageError(
                "--journal replay: there is no journal to replay; record one with --journal reuse, or name "
                "one with --journal-from DIR"
            )

    def find(self, key: Key) -> Outcome | None:
        """The recorded outcome of a call; None if the call must be sent."""
        if not self.reuses:
            return None
        found = self._replies.get(key.digest)
        return self._failures.get(key.digest) if found is None and self.mode == "replay" else found

    def new_call(self) -> int:
        """The number of a new call in the rank's own file."""
        self._calls += 1
        return self._calls

    def write(self, call: int, key: Key, charged: Spending, outcome: Outcome | None, **about: object) -> None:
        """Append what a call is charged so far and, if it has ended, its outcome and what else is known.

        It is one write: a kill leaves at most one torn line, the last.
        """
        if self._file < 0:
            return
        line: dict[str, object] = {"key": key.digest, "call": call, "charged": charged.amounts}
        if outcome is not None:
            line |= {name: getattr(outcome, name) for name in STORED} | about
            line |= {
                "source": key.source,
                "prompt": key.messages[-1]["content"],
                "time": round(time.time(), 3),
            }
            if outcome.verdict in REPLIED:
                self._replies[key.digest] = outcome
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, path: Path) -> dict[int, Spending]:
        """Remember the outcomes in a file; what each of its calls was charged. Other lines are skipped."""
        charges = {}
        with path.open("rb") as file:
            for line in map(json_object, file):
                key, call, charged = line.get("key"), line.get("call"), _charge_of(line)
                if not isinstance(key, str) or not isinstance(call, int) or charged is None:
                    continue
                charges[call] = charged
                if all(type(line.get(name)) is type(getattr(EMPTY, name)) for name in STORED):
                    known = self._replies if line["verdict"] in REPLIED else self._failures
                    if line["verdict"] in (*REPLIED, *FAILED):
                        known[key] = Outcome(**{name: line[name] for name in STORED})
        return charges


def _charge_of(line: Mapping[str, Any]) -> Spending | None:
    """What a call was charged up to a line; None if the line does not say so."""
    amounts = line.get("charged")
    if not isinstance(amounts, list) or len(amounts) != len(Spending().amounts):
        return None
    fits = all(is_finite_number(amount) and amount >= 0 for amount in amounts)
    return Spending(*amounts) if fits else None


def _open_to_append(path: Path) -> int:
    """Open the file to append, and end a torn last line. Returns the file descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file
