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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Spending
from prompt_r1.errors import UsageError
from prompt_r1.types import Message

STORED = ("verdict", "text", "label", "reason", "reasoning", "finish", "tokens_in", "tokens_out")
assert set(STORED) <= {f.name for f in fields(Outcome)}
REPLIED = ("ok", "outcome")  # the verdicts of calls that are not sent again


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


@dataclass(frozen=True)
class Location:
    """The line of a recorded reply."""

    path: Path
    offset: int  # bytes


class Journal:
    """Writes to `folder`/rankN.jsonl. Reads all of `folder` and, for replies only, the journals in `others`.

    Without a folder nothing is written. Replies stay on disk; only their locations are kept in memory.
    """

    def __init__(
        self, folder: Path | None, *, mode: str = "reuse", rank: int = 0, others: Iterable[Path] = ()
    ) -> None:
        self.mode = mode
        self.spent = Spending()
        self._locations: dict[str, Location] = {}  # by key
        self._failures: dict[str, str] = {}  # reasons of calls without a reply, by key
        for other in others:
            files = sorted(other.rglob("rank*.jsonl")) if other.is_dir() else [other]
            if not files or not files[0].exists():
                raise UsageError(f"--journal-from {other}: there is no journal")
            for path in files:
                self._read(path)
        for path in sorted(folder.glob("rank*.jsonl")) if folder else []:
            self.spent += self._read(path)
        if mode == "replay" and not self._locations:
            raise UsageError(
                "--journal replay: there is no journal to replay; record one with --journal reuse, or name "
                "one with --journal-from DIR"
            )
        self._path = folder / f"rank{rank}.jsonl" if folder and mode != "replay" else None
        self._file = _open_to_append(self._path) if self._path else -1

    @property
    def reuses(self) -> bool:
        return self.mode != "live" and (self._file >= 0 or bool(self._locations))

    def find(self, call: Call) -> Outcome | None:
        """The recorded outcome of a call; None if the call must be sent."""
        if not self.reuses:
            return None
        location = self._locations.get(call.key)
        if location is not None:
            with location.path.open("rb") as file:
                file.seek(location.offset)
                line = json.loads(file.readline())
            return Outcome(**{name: line[name] for name in STORED})
        if self.mode == "replay" and call.key in self._failures:
            return Outcome("retry", reason=self._failures[call.key])
        return None

    def write(self, call: Call, outcome: Outcome, *, spent: Spending, latency: float) -> None:
        """Append a call that has ended. It is one write: a kill leaves at most one torn line, the last."""
        if self._path is None:
            return
        line: dict[str, object] = {
            "key": call.key,
            "model": call.model,
            "session": call.session,
            "sample": call.sample,
            "prompt": call.messages[-1]["content"],
        }
        line |= {name: getattr(outcome, name) for name in STORED}
        line |= {"latency": round(latency, 4), "usd": spent.usd, "time": round(time.time(), 3)}
        if outcome.lost:  # attempts that may have been billed besides the reply; `usd` includes them
            line["lost_tokens"] = spent.tokens - outcome.tokens_in - outcome.tokens_out
        offset = os.lseek(self._file, 0, os.SEEK_END)
        os.write(self._file, json.dumps(line).encode() + b"\n")
        if outcome.verdict in REPLIED:
            self._locations[call.key] = Location(self._path, offset)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file, self._path = -1, None

    def _read(self, path: Path) -> Spending:
        """Note the locations of a file's replies, and return what its calls cost. Skips damaged lines."""
        spent, offset = Spending(), 0
        with path.open("rb") as file:
            for raw in file:
                try:
                    line = json.loads(raw)
                    key, verdict = line["key"], line["verdict"]
                    tokens = line["tokens_in"] + line["tokens_out"] + line.get("lost_tokens", 0)
                    spent += Spending(1, tokens, line["usd"])
                    if verdict not in REPLIED:
                        self._failures[key] = line["reason"]
                    elif all(name in line for name in STORED):
                        self._locations.setdefault(key, Location(path, offset))
                except (ValueError, KeyError, TypeError, RecursionError):
                    pass
                offset += len(raw)
        return spent


def _open_to_append(path: Path) -> int:
    """Open the file to append, and end a torn last line. Returns the file descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file
