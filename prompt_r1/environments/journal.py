"""The journal: a resumed run pays for no reply twice.

Each rank appends JSON lines to a file of its own. It reads the files of the other ranks only at the start. So
if two ranks make the same call during a run, both pay.

A call may need several requests. Each request has a number, in the field "call" of its lines. Before it is
sent, a line says what it costs if the process is killed now. When it has ended, a line with the same
number says what it has cost. So the last line of a number counts. If a line has a `reply`, the call is never
sent again.

A kill or a full disk loses the replies of the requests that are running. What they may have cost is already
written, so the budget counts it. A resumed run sends their calls again.
"""

import json
import os
import time
from dataclasses import asdict
from itertools import count
from pathlib import Path

from prompt_r1.environments.sources import Reply
from prompt_r1.errors import UsageError
from prompt_r1.programs.files import append_line
from prompt_r1.programs.reading import check_values, json_object
from prompt_r1.spending import Spending


class Journal:
    """Reads all files of `folder`, and writes to its rankN.jsonl.

    Without a folder it writes nothing and knows no replies. `charged` is what the requests in the folder
    had cost when it was opened. Raises UsageError for a file that we have not written.
    """

    def __init__(self, folder: Path | None, *, rank: int = 0) -> None:
        self.charged = Spending()
        self.is_on_disk = folder is not None  # whether there are files
        # Call key → the file with its reply, and where the line begins. The replies themselves stay on the
        # disk: the replies of a long run would take more than a gigabyte of memory on each rank.
        self.places: dict[str, tuple[Path, int]] = {}
        self._numbers = count(1)  # the numbers of new requests in this rank's file
        if folder is None:
            return
        own = folder / f"rank{rank}.jsonl"
        for path in sorted(folder.glob("rank*.jsonl")):
            if path != own:
                self._read(path)
        if own.exists():
            # This rank's file is read last. So if two ranks have paid for the same call, the resumed run gets
            # the reply that this rank had.
            charges = self._read(own)
            last_number = max(charges, default=0)
            self._numbers = count(last_number + 1)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(own, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
        self._own = own

    def begin(self, key: str, cost_if_lost: Spending) -> int:
        """Write what a request costs if the process is killed now. Returns the number of the request.

        Raises OSError if it cannot be written, for example to a full disk. Then the request may not be sent.
        """
        number = next(self._numbers)
        if self.is_on_disk:
            line = {"key": key, "call": number, "charged": cost_if_lost.amounts}
            append_line(self._file, json.dumps(line))
        return number

    def end(
        self, number: int, key: str, charged: Spending, reply: Reply | None, *, source: str, prompt: str
    ) -> None:
        """Write what a request has cost, and the reply to its call if there is one.

        The line of a reply also has its source and its prompt, for people who read the file.
        """
        if not self.is_on_disk:
            return
        line: dict[str, object] = {"key": key, "call": number, "charged": charged.amounts}
        if reply is not None:
            line |= {"reply": asdict(reply), "time": round(time.time(), 3), "usd": charged.usd}
            line |= {"source": source, "prompt": prompt}
        begin = append_line(self._file, json.dumps(line))
        if reply is not None:
            self.places[key] = (self._own, begin)

    def reply(self, key: str) -> tuple[Reply, Spending] | None:
        """Read the recorded reply of a call, and what it was charged; None if there is none."""
        if key not in self.places:
            return None
        path, offset = self.places[key]
        with path.open("rb") as file:
            file.seek(offset)
            line = json.loads(file.readline())
        assert line["key"] == key, f"{path} has changed at byte {offset} since it was read"
        return Reply(**line["reply"]), Spending(*line["charged"])

    def _read(self, path: Path) -> dict[int, Spending]:
        """Note where a file has its replies, and add up its charges. Returns the charges by request number.

        Lines that are no JSON are skipped, because a kill may leave an incomplete line.
        """
        charges: dict[int, Spending] = {}
        offset = 0
        with path.open("rb") as file:
            for line_number, text in enumerate(file, start=1):
                begin = offset
                offset += len(text)
                line = json_object(text)
                if not line:
                    continue
                try:
                    charged = Spending(*line["charged"])
                    check_values(charged)
                    if min(charged.amounts) < 0:
                        raise ValueError(f"charged is {charged.amounts}")
                    number = line["call"]
                    if type(number) is not int:
                        raise ValueError(f"call is {number!r:.50}")
                    charges[number] = charged
                    if "reply" in line:
                        check_values(Reply(**line["reply"]))
                        self.places[line["key"]] = (path, begin)
                except (KeyError, TypeError, ValueError) as error:
                    raise UsageError(
                        f"{path}, line {line_number}: no call of this version ({error}); give another --out"
                    ) from None
        self.charged += sum(charges.values(), Spending())
        return charges
