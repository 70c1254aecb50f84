"""The journal of a run: one JSON line for each call of an environment, so that no call is paid for twice.

    live    every call is sent, and written
    reuse   a call whose reply is in the journal is not sent again
    replay  nothing is sent; a call without a reply in the journal is an error

A call is found by its key: a digest of model, messages, parameters and the number of the game in its group,
so that the games of one question still get different replies. A run's own journal also says what it has
spent.
"""

import hashlib
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Spending
from prompt_r1.errors import UsageError
from prompt_r1.foreign import check_no_links, is_finite_number
from prompt_r1.types import Message

STORED = ("verdict", "text", "label", "reason", "reasoning", "finish", "tokens_in", "tokens_out")
EMPTY = Outcome("ok")  # its fields have the types of stored ones
assert set(STORED) <= {f.name for f in fields(Outcome)}
REPLIED = ("ok", "outcome")  # the verdicts of calls that are not sent again

# Each line begins with its key and its verdict, which can be read without parsing the line.
START, SECOND = b'{"key": "', b'", "verdict": "'
HALF_KEY = slice(len(START), len(START) + 16)
KEY_END = len(START) + 32
VERDICT = slice(KEY_END + len(SECOND), KEY_END + len(SECOND) + 2)  # its first two letters
CHECKSUM = b', "crc32": '  # its last field; in no text, where quotes are escaped
CHUNK = 1 << 24  # bytes


@dataclass(frozen=True)
class Call:
    """One call of an environment in a game."""

    model: str
    messages: list[Message]
    parameters: Mapping[str, object]  # everything else that shapes the reply
    sample: int  # number of the game among the games of its question
    session: str = ""  # id of the question

    @cached_property
    def key(self) -> str:
        """The digest that identifies the call: two calls with the same key may share a reply."""
        parts = json.dumps([self.model, self.messages, self.parameters, self.sample], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()[:32]


class LineIndex:
    """Finds the lines of a file by key, with 16 bytes of memory for each line."""

    def __init__(self) -> None:
        self._halves: list[bytes] = []  # of keys, in hexadecimal digits, since `pack`
        self._offsets: list[int] = []
        self._packed = [np.zeros((2, 0), np.uint64)]  # halves as numbers, and offsets

    def __len__(self) -> int:
        return sum(part.shape[1] for part in self._packed)

    def add(self, half: bytes, offset: int) -> None:
        """Add a line by the first half of its key."""
        self._halves.append(half)
        self._offsets.append(offset)

    def pack(self) -> None:
        """Store the lines added so far compactly."""
        numbers = [_as_number(half) for half in self._halves]
        self._packed.append(np.array([numbers, self._offsets], np.uint64))
        self._halves, self._offsets = [], []

    def sort(self) -> None:
        """Sort the packed lines by key, for `find`. Lines with equal keys keep their order."""
        packed = np.concatenate(self._packed, axis=1)
        self._packed = [packed[:, np.argsort(packed[0], kind="stable")]]

    def find(self, key: str) -> list[int]:
        """The offsets of the lines whose keys have the same first half as this one."""
        keys, offsets = self._packed[0]
        half = np.uint64(_as_number(key[:16].encode()))
        first, last = np.searchsorted(keys, half, "left"), np.searchsorted(keys, half, "right")
        return [int(offset) for offset in offsets[first:last]]


class RecordedFile:
    """One file of a journal as it was opened: what its calls cost, and where replies and failures are.

    Lines that begin as ours do are not parsed: what they cost is in the totals of the last one. All other
    lines are parsed; what they say they cost is counted even if the rest is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replies, self.failures = LineIndex(), LineIndex()
        parsed, last, offset = Spending(), deque[bytes](maxlen=9), 0
        with path.open("rb") as file:
            while lines := file.readlines(CHUNK):
                for raw in lines:
                    if raw[: len(START)] == START and raw[KEY_END : VERDICT.start] == SECOND:
                        index = self.replies if raw[VERDICT] in (b"ok", b"ou") else self.failures
                        index.add(raw[HALF_KEY], offset)
                        last.append(raw)
                    else:
                        parsed += self._parse(raw, offset)
                    offset += len(raw)
                self.replies.pack()
                self.failures.pack()
        self.replies.sort()
        self.failures.sort()
        # Lines without totals are older: the totals include them.
        totals = (_totals_of(_parse_line(raw)) for raw in reversed(last))
        self.spent = next(filter(None, totals), parsed)

    def read(self, key: str, *, failed: bool = False) -> Iterator[Mapping[str, Any]]:
        """The lines with this key that are complete, the first one first."""
        for offset in (self.failures if failed else self.replies).find(key):
            yield from read_line(self.path, offset, key)

    def _parse(self, raw: bytes, offset: int) -> Spending:
        """Add a line of another form to an index, and return what it cost."""
        line = _parse_line(raw)
        key = line.get("key")
        if isinstance(key, str) and len(key) == 32:
            index = self.replies if line.get("verdict") in REPLIED else self.failures
            index.add(key[:16].encode(), offset)
        return _cost_of(line)


def read_line(path: Path, offset: int, key: str) -> Iterator[Mapping[str, Any]]:
    """The line at an offset, if it has this key and all fields of an outcome."""
    with path.open("rb") as file:
        file.seek(offset)
        line = _parse_line(file.readline())
    if line.get("key") == key and all(type(line.get(name)) is type(getattr(EMPTY, name)) for name in STORED):
        yield line


def _parse_line(raw: bytes) -> dict[str, Any]:
    """The fields of a line; {} if it is damaged. Lines of older versions have no checksum."""
    before, mark, _ = raw.rpartition(CHECKSUM)
    if mark and _with_checksum(before) != raw.rstrip(b"\n"):
        return {}
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _with_checksum(fields: bytes) -> bytes:
    """A JSON object whose last field is the checksum of the bytes before it."""
    return fields + CHECKSUM + b"%d}" % zlib.crc32(fields)


def _cost_of(line: Mapping[str, Any]) -> Spending:
    """What one call cost, as its line says; nothing if that cannot be."""
    lost = [line.get(name, 0) for name in ("lost", "lost_tokens", "lost_usd")]
    if not _are_amounts([*(line.get(name) for name in ("tokens_in", "tokens_out", "usd")), *lost]):
        return Spending()
    return Spending(1, line["tokens_in"] + line["tokens_out"], line["usd"], *lost)


def _totals_of(line: Mapping[str, Any]) -> Spending | None:
    """What all calls of the file up to this line cost; None if the line does not say so."""
    totals = line.get("totals")
    if isinstance(totals, list) and len(totals) == len(fields(Spending)) and _are_amounts(totals):
        return Spending(*totals)
    return None


def _are_amounts(values: Iterable[object]) -> bool:
    return all(is_finite_number(value) and value >= 0 for value in values)


def _as_number(half: bytes) -> int:
    """The first half of a key as a number; 0, which is found for no key, if it is none."""
    try:
        return int(half, 16) % 2**64
    except ValueError:
        return 0


class Journal:
    """Writes to `folder`/rankN.jsonl. Reads all of `folder` and, for replies only, the journals in `others`.

    Without a folder nothing is written. Replies stay on disk; only where they are is kept in memory.
    """

    def __init__(
        self, folder: Path | None, *, mode: str = "reuse", rank: int = 0, others: Iterable[Path] = ()
    ) -> None:
        self.mode = mode
        self._files: list[RecordedFile] = []
        self._written: dict[int, int] = {}  # offsets of the replies of this process, by half of the key
        for other in others:
            check_no_links(other)
            paths = sorted(other.rglob("rank*.jsonl")) if other.is_dir() else [other]
            if not paths or not paths[0].exists():
                raise UsageError(f"--journal-from {other}: there is no journal")
            self._files += map(RecordedFile, paths)
        own = [RecordedFile(path) for path in sorted(folder.glob("rank*.jsonl"))] if folder else []
        self._files += own
        self.spent = sum((file.spent for file in own), Spending())
        if mode == "replay" and not any(len(file.replies) for file in self._files):
            raise UsageError(
                "--journal replay: there is no journal to replay; record one with --journal reuse, or name "
                "one with --journal-from DIR"
            )
        self._path = folder / f"rank{rank}.jsonl" if folder and mode != "replay" else None
        self._totals = sum((file.spent for file in own if file.path == self._path), Spending())
        self._file = _open_to_append(self._path) if self._path else -1

    @property
    def reuses(self) -> bool:
        return self.mode != "live" and (self._file >= 0 or any(len(file.replies) for file in self._files))

    def find(self, call: Call) -> Outcome | None:
        """The recorded outcome of a call; None if the call must be sent."""
        if not self.reuses:
            return None
        for line in self._replies_to(call.key):
            if line["verdict"] in REPLIED:
                return Outcome(**{name: line[name] for name in STORED})
        if self.mode == "replay":
            for file in self._files:
                for line in file.read(call.key, failed=True):
                    return Outcome("retry", reason=line["reason"])
        return None

    def write(self, call: Call, outcome: Outcome, *, spent: Spending, latency: float) -> None:
        """Append a call that has ended. It is one write: a kill leaves at most one torn line, the last."""
        if self._path is None:
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
        self._totals += spent
        line["totals"] = self._totals.amounts  # of this file, up to this line
        offset = os.lseek(self._file, 0, os.SEEK_END)
        os.write(self._file, _with_checksum(json.dumps(line).encode()[:-1]) + b"\n")
        if outcome.verdict in REPLIED:
            self._written[_as_number(call.key[:16].encode())] = offset

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file, self._path = -1, None

    def _replies_to(self, key: str) -> Iterator[Mapping[str, Any]]:
        written = self._written.get(_as_number(key[:16].encode()))
        if self._path is not None and written is not None:
            yield from read_line(self._path, written, key)
        for file in self._files:
            yield from file.read(key)


def _open_to_append(path: Path) -> int:
    """Open the file to append, and end a torn last line. Returns the file descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file
