"""What each call of a run cost, from its journal."""

import json
from pathlib import Path


class CallCosts:
    """Finds the journal's line of a call: tokens in and out, and dollars. Free environments count none.

    Of the texts only a hash is kept: a long run's journal is larger than memory.
    """

    def __init__(self, journal: Path) -> None:
        self._found: dict[int, tuple[int, int, float]] = {}
        for path in sorted(journal.glob("rank*.jsonl")):
            with path.open(encoding="utf-8") as file:
                for line in file:
                    self._note(line)

    def find(self, session: str, sample: int, prompt: str | None, reply: str | None) -> dict[str, float]:
        """{in, out, usd} of a call; {} where it was free or is not in the journal."""
        cost = self._found.get(hash((session, sample, prompt, reply)))
        return dict(zip(("in", "out", "usd"), cost, strict=True)) if cost else {}

    def _note(self, line: str) -> None:
        # Free calls, the most in the mini world, are passed over before they are parsed.
        if '"tokens_in": 0, "tokens_out": 0,' in line:
            return
        try:
            call = json.loads(line)
            key = hash((call["session"], call["sample"], call["prompt"], call["text"]))
            self._found[key] = call["tokens_in"], call["tokens_out"], call["usd"]
        except (ValueError, KeyError, TypeError):
            return  # a line that a kill cut short
