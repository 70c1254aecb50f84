"""The cost of each call of a run, from its journal."""

import json
from math import isfinite
from pathlib import Path


class CallCosts:
    """Looks up tokens and dollars of a call in the journal. Calls of free environments have none.

    Only a hash of the texts is kept, because the journal of a long run can be larger than memory.
    """

    def __init__(self, journal: Path) -> None:
        self._costs: dict[int, dict[str, float]] = {}
        for path in sorted(journal.glob("rank*.jsonl")):
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    self._add(line)

    def find(self, session: str, sample: int, prompt: str | None, reply: str | None) -> dict[str, float]:
        """{in, out, usd} of a call; {} if it was free or is not in the journal."""
        return self._costs.get(hash((session, sample, prompt, reply)), {})

    def _add(self, line: str) -> None:
        # Skip free calls, such as those of the mini world, before parsing: it saves most of the time.
        if '"tokens_in": 0, "tokens_out": 0,' in line:
            return
        try:
            call = json.loads(line)
            key = hash((call["session"], call["sample"], call["prompt"], call["text"]))
            cost = {"in": call["tokens_in"], "out": call["tokens_out"], "usd": call["usd"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            return  # a line that was cut short by a kill, or is damaged
        if all(isinstance(number, int | float) and isfinite(number) for number in cost.values()):
            self._costs[key] = cost
