"""Every call of the environment, one JSON line written as it ends; read again so that none is paid twice.

    live    every call is sent, and written
    reuse   a call whose reply the journal holds is not sent again
    replay  nothing is sent at all; a call without a reply in the journal is an error

A line is found by its key: model, messages, parameters, and the number of the game in its group, so that the
games of one question still get different replies. A run's own journal is also what it has spent so far.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Spending
from prompt_r1.errors import UsageError
from prompt_r1.types import Message

STORED = ("verdict", "text", "label", "reason", "reasoning", "finish", "tokens_in", "tokens_out")
assert set(STORED) <= {f.name for f in fields(Outcome)}


def key_of(model: str, messages: list[Message], parameters: Mapping[str, object], sample: int) -> str:
    """The name of a call: two calls with the same key may share a reply."""
    parts = json.dumps([model, messages, parameters, sample], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


class Journal:
    """Writes to `folder`/rankN.jsonl; reads all of `folder` and, for replies only, the journals in `others`.

    Without a folder nothing is written. Replies stay on disk; what is in memory is where each one lies.
    """

    def __init__(
        self, folder: Path | None, *, mode: str = "reuse", rank: int = 0, others: Iterable[Path] = ()
    ) -> None:
        self.mode = mode
        self.spent = Spending()
        self._places: dict[str, tuple[Path, int]] = {}
        self._failures: dict[str, str] = {}  # key → why, of calls that have no reply
        for other in others:
            files = sorted(other.rglob("rank*.jsonl")) if other.is_dir() else [other]
            if not files or not files[0].exists():
                raise UsageError(f"--journal-from {other}: there is no journal")
            for path in files:
                self._read(path)
        for path in sorted(folder.glob("rank*.jsonl")) if folder else []:
            self.spent += self._read(path)
        if mode == "replay" and not self._places:
            raise UsageError("--journal replay: there is no journal to replay; record one with "
                             "--journal reuse, or name one with --journal-from DIR")  # fmt: skip
        self._path = folder / f"rank{rank}.jsonl" if folder and mode != "replay" else None
        self._file = _open_to_append(self._path) if self._path else -1

    @property
    def reuses(self) -> bool:
        return self.mode != "live" and (self._file >= 0 or bool(self._places))

    def find(self, key: str) -> Outcome | None:
        """The recorded end of this call; None where there is none, or where the call is to be sent anyway."""
        if not self.reuses:
            return None
        if key in self._places:
            path, offset = self._places[key]
            with path.open("rb") as file:
                file.seek(offset)
                line = json.loads(file.readline())
            return Outcome(**{name: line[name] for name in STORED})
        if self.mode == "replay" and key in self._failures:
            return Outcome("retry", reason=self._failures[key])
        return None

    def write(
        self, key: str, outcome: Outcome, spent: Spending, *, model: str, prompt: str, sample: int,
        session: str, latency: float,
    ) -> None:  # fmt: skip
        """Append a call that has ended. One write: a kill leaves at most one torn line, the last."""
        if self._path is None:
            return
        line = {
            "key": key, "model": model, "session": session, "sample": sample, "prompt": prompt,
            **{name: getattr(outcome, name) for name in STORED},
            "latency": round(latency, 4), "usd": spent.usd, "time": round(time.time(), 3),
        }  # fmt: skip
        offset = os.lseek(self._file, 0, os.SEEK_END)
        os.write(self._file, json.dumps(line).encode() + b"\n")
        if outcome.verdict in ("ok", "outcome"):
            self._places[key] = (self._path, offset)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file, self._path = -1, None

    def _read(self, path: Path) -> Spending:
        """Note where the replies of a file lie; what its calls have cost. Torn lines are passed over."""
        spent, offset = Spending(), 0
        with path.open("rb") as file:
            for raw in file:
                try:
                    line = json.loads(raw)
                    key, verdict = line["key"], line["verdict"]
                    spent += Spending(1, line["tokens_in"] + line["tokens_out"], line["usd"])
                except (ValueError, KeyError, TypeError):
                    pass
                else:
                    if verdict in ("ok", "outcome"):
                        self._places.setdefault(key, (path, offset))
                    else:
                        self._failures[key] = line["reason"]
                offset += len(raw)
        return spent


def _open_to_append(path: Path) -> int:
    """The file's descriptor, at the beginning of a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    if torn:
        os.write(file, b"\n")
    return file
