"""The journal: no call is paid for twice.

    live    every call is sent, and written
    reuse   a call whose reply is in the journal is not sent again
    replay  nothing is sent; a call without a reply in the journal is an error

A call is found by its key: a digest of model, messages, parameters, the number of the game in its group,
where the environment samples, the epoch, and where it takes the session, the question: games of one question,
and later epochs, get replies of their own.
Each rank appends to a file of its own, without locks, and reads all files when it starts.
"""

import hashlib
import json
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.errors import UsageError
from prompt_r1.foreign import check_no_links, is_finite_number, json_object
from prompt_r1.spending import Spending
from prompt_r1.types import Message

STORED = ("verdict", "text", "label", "reason", "reasoning", "finish", "tokens_in", "tokens_out")
EMPTY = Outcome("ok")  # its fields have the types of stored ones
REPLIED = ("ok", "outcome")  # the verdicts of calls that are not sent again

# A line begins with half of its key, the other half, and its verdict: they are found without parsing it.
START = re.compile(rb'\{"key": "([0-9a-f]{16})[0-9a-f]{16}", "verdict": "(ok"|outcome")?')
CHECKSUM = b', "crc32": '  # the last field of a line; in no text, where quotes are escaped


@dataclass(frozen=True)
class Call:
    """One call of an environment in a game."""

    model: str
    messages: list[Message]
    parameters: Mapping[str, object]  # everything else that shapes the reply
    sample: int  # number of the game among the games of its question
    session: str = ""  # id of the question
    epoch: int = 0  # of training; 0 wherever equal messages have equal replies
    by_session: bool = False  # the reply depends on the session too

    @cached_property
    def key(self) -> str:
        """The digest that identifies the call: two calls with the same key may share a reply."""
        later: list[object] = [self.epoch] if self.epoch else []  # without: the keys of older journals
        if self.by_session:
            later.append(self.session)
        parts = [self.model, self.messages, self.parameters, self.sample, *later]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class RecordedCalls:
    """The calls in one file: what they cost, and where the last reply and failure of each key are.

    Replies stay on disk. Lines that are cut short or have another form are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replies: dict[bytes, int] = {}  # offset of a line, by the first half of its key
        self.failures: dict[bytes, int] = {}
        last, offset = deque[bytes](maxlen=9), 0
        with path.open("rb") as file:
            for raw in file:
                if (found := START.match(raw)) and raw.endswith(b"}\n"):
                    half, replied = found.groups()
                    (self.replies if replied else self.failures)[half] = offset
                    last.append(raw)
                offset += len(raw)
        # Each line has the totals of all calls up to it. The last one may be damaged.
        totals = (_totals_of(_parse_line(raw)) for raw in reversed(last))
        self.spent = next(filter(None, totals), Spending())

    def read(self, key: str, *, failed: bool = False) -> Mapping[str, Any] | None:
        """The line of a reply or of a failure; None if there is none, or only a damaged one."""
        offset = (self.failures if failed else self.replies).get(_half(key))
        if offset is None:
            return None
        with self.path.open("rb") as file:
            file.seek(offset)
            line = _parse_line(file.readline())
        typed = all(type(line.get(name)) is type(getattr(EMPTY, name)) for name in STORED)
        return line if typed and line["key"] == key else None


class Journal:
    """Writes to `folder`/rankN.jsonl. Reads all of `folder` and, for replies only, the journals in `others`.

    `spent` is what the calls in `folder` cost when it was opened. Without a folder nothing is written.
    """

    def __init__(
        self, folder: Path | None, *, mode: str = "reuse", rank: int = 0, others: Iterable[Path] = ()
    ) -> None:
        self.mode = mode
        path = folder / f"rank{rank}.jsonl" if folder and mode != "replay" else None
        self._file = _open_to_append(path) if path else -1
        of_run = [RecordedCalls(found) for found in sorted(folder.glob("rank*.jsonl"))] if folder else []
        self.spent = sum((file.spent for file in of_run), Spending())
        self._own = next((file for file in of_run if file.path == path), None)
        # The rank's own file first: a resumed run gets the replies that it had, not those of another rank.
        self._files = sorted(of_run, key=lambda file: file is not self._own)
        for other in others:
            check_no_links(other)
            paths = sorted(other.rglob("rank*.jsonl")) if other.is_dir() else [other]
            if not paths or not paths[0].exists():
                raise UsageError(f"--journal-from {other}: there is no journal")
            self._files += map(RecordedCalls, paths)
        if mode == "replay" and not any(file.replies for file in self._files):
            raise UsageError(
                "--journal replay: there is no journal to replay; record one with --journal reuse, or name "
                "one with --journal-from DIR"
            )

    @property
    def reuses(self) -> bool:
        return self.mode != "live" and bool(self._files)

    def find(self, call: Call) -> Outcome | None:
        """The recorded outcome of a call; None if the call must be sent."""
        if not self.reuses:
            return None
        for file in self._files:
            if line := file.read(call.key):
                return Outcome(**{name: line[name] for name in STORED})
        for file in self._files if self.mode == "replay" else []:
            if line := file.read(call.key, failed=True):
                return Outcome("retry", reason=line["reason"])
        return None

    def write(self, call: Call, outcome: Outcome, *, spent: Spending, latency: float) -> None:
        """Append a call that has ended. It is one write: a kill leaves at most one torn line, the last."""
        if self._own is None:
            return
        line: dict[str, object] = {
            "key": call.key,
            "verdict": outcome.verdict,
            "model": call.model,
            "session": call.session,
            "sample": call.sample,
            "prompt": call.messages[-1]["content"],
        }
        line |= {name: getattr(outcome, name) for name in STORED}
        line |= {"latency": round(latency, 4), "usd": spent.usd, "time": round(time.time(), 3)}
        if outcome.lost:  # attempts that may have been billed besides the reply
            line |= {"lost": outcome.lost, "lost_tokens": spent.lost_tokens, "lost_usd": spent.lost_usd}
        self._own.spent += spent
        line["totals"] = self._own.spent.amounts  # of this file, up to this line
        offset = os.lseek(self._file, 0, os.SEEK_END)
        os.write(self._file, _with_checksum(json.dumps(line).encode()[:-1]) + b"\n")
        if outcome.verdict in REPLIED:
            self._own.replies[_half(call.key)] = offset

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file, self._own = -1, None


def _half(key: str) -> bytes:
    return key[:16].encode()


def _parse_line(raw: bytes) -> dict[str, Any]:
    """The fields of a line; {} if it is damaged. Lines of older versions have no checksum."""
    before, mark, _ = raw.rpartition(CHECKSUM)
    if mark and _with_checksum(before) != raw.rstrip(b"\n"):
        return {}
    return json_object(raw)


def _with_checksum(fields: bytes) -> bytes:
    """A JSON object whose last field is the checksum of the bytes before it."""
    return fields + CHECKSUM + b"%d}" % zlib.crc32(fields)


def _totals_of(line: Mapping[str, Any]) -> Spending | None:
    """What all calls of the file up to this line cost; None if the line does not say so."""
    totals = line.get("totals")
    if not isinstance(totals, list) or not all(is_finite_number(value) and value >= 0 for value in totals):
        return None
    if len(totals) == 6:  # of older versions, which counted tokens in and out together
        totals = [*totals[:2], 0, *totals[2:]]
    return Spending(*totals) if len(totals) == len(fields(Spending)) else None


def _open_to_append(path: Path) -> int:
    """Open the file to append, and end a torn last line. Returns the file descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file
