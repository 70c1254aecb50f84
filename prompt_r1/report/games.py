"""The games that the report shows, read from the files of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prompt_r1.foreign import json_object
from prompt_r1.metrics.em_f1 import exact_match

MOST_GROUPS = 12  # shown of a step
NOT_A_ROW = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
Row = Mapping[str, Any]  # a game as a line of trajectories/*.jsonl


@dataclass
class ShownGroup:
    """The games of one question in one step, such as "training step 3"."""

    source: str
    games: list[Row]

    @property
    def right(self) -> int:
        return sum(is_right(game) is True for game in self.games)

    @property
    def is_mixed(self) -> bool:
        """Whether it was trained on, and has right and wrong games."""
        trained = any(game["advantage"] for game in self.games)
        return trained and 0 < self.right < len(self.games)


def is_right(game: Row) -> bool | None:
    """Whether the answer equals a gold answer; None for long texts, for which only F1 means something."""
    answer, question = game["answer"], game["question"]
    return None if question["kind"] == "text" else exact_match(answer or "", question["answers"]) == 1


def read_groups(folder: Path, *, best: int) -> list[ShownGroup]:
    """The training games of the first, middle, last and best step, and the validation games of the best.

    Groups of right and wrong games come first, of which something is learned. Lines that were cut short by a
    kill are skipped. Raises an error of NOT_A_ROW for a line that is no game.
    """
    training = _files_by_step(folder / "trajectories", "step")
    steps = sorted(training)
    chosen = {steps[0], steps[len(steps) // 2], steps[-1], best} & training.keys() if steps else set()
    sources = [(f"training step {step}", training[step]) for step in sorted(chosen)]
    if validation := _files_by_step(folder / "trajectories", "validation").get(best):
        sources.append((f"validation step {best}", validation))
    groups: list[ShownGroup] = []
    for source, paths in sources:
        lines = (line for path in paths for line in path.read_text("utf-8", "replace").splitlines())
        rows = filter(None, map(json_object, lines))
        by_question = groupby(rows, key=lambda row: (row["group"], row["question"]["id"]))
        groups += _mixed_first([ShownGroup(source, list(games)) for _, games in by_question])[:MOST_GROUPS]
    return _mixed_first(groups)


def _mixed_first(groups: list[ShownGroup]) -> list[ShownGroup]:
    return sorted(groups, key=lambda group: not group.is_mixed)


def _files_by_step(folder: Path, kind: str) -> dict[int, list[Path]]:
    """The trajectory files of each step."""
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.glob(f"{kind}-*-rank*.jsonl")):
        files.setdefault(int(path.name.split("-")[1]), []).append(path)
    return files
