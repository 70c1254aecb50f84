"""The cost of each call of a run, from its journal."""

import json
from collections.abc import Collection
from pathlib import Path

from prompt_r1.foreign import is_finite_number


def key_of_call(session: str, sample: int, prompt: str | None, reply: str | None) -> int:
    """The key of a call in CallCosts: a hash, because the texts of a long run can be larger than memory."""
    return hash((session, sample, prompt, reply))


class CallCosts:
    """Looks up tokens and dollars of some calls in the journal. Calls of free environments have none.

    `keys` are the calls that may be looked up: a run of a million calls shows those of 8,000 games.
    """

    def __init__(self, journal: Path, keys: Collection[int]) -> None:
        self._keys = keys
        self._costs: dict[int, dict[str, float]] = {}
        if not keys:
            return
        for path in sorted(journal.glob("rank*.jsonl")):
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    self._add(line)

    def find(self, key: int) -> dict[str, float]:
        """{in, out, usd} of a call; {} if it was free or is not in the journal."""
        return self._costs.get(key, {})

    def _add(self, line: str) -> None:
        # Skip free calls, such as those of the mini world, before parsing: it saves most of the time.
        if '"tokens_in": 0, "tokens_out": 0,' in line:
            return
        try:
            call = json.loads(line)
            key = key_of_call(call["session"], call["sample"], call["prompt"], call["text"])
            cost = {"in": call["tokens_in"], "out": call["tokens_out"], "usd": call["usd"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            return  # a line that was cut short by a kill, or is damaged
        if key in self._keys and all(map(is_finite_number, cost.values())):
            self._costs[key] = cost
