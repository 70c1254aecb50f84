"""The data of the report, read from a run folder: settings, curves, and groups of games."""

import json
import math
import re
from collections.abc import Iterator
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import yaml

from prompt_r1.errors import UsageError
from prompt_r1.metrics.statistics import wilson
from prompt_r1.report.costs import CallCosts
from prompt_r1.report.spans import TokenTexts, spans_of
from prompt_r1.reward import RULES

MEGABYTES = 120  # of trajectory files at most: they are read into memory
Row = dict[str, Any]


def read_run(folder: Path, *, games: int) -> Row:
    """The data of a run. Raises UsageError for a folder without a run, or with files of something else."""
    if not (folder / "metrics.jsonl").exists():
        raise UsageError(
            f"{folder}: there is no metrics.jsonl in it; give a run folder, such as runs/mini-seed0"
        )
    settings = _read_settings(folder / "config.yaml")
    lines = list(_lines(folder / "metrics.jsonl"))
    if not lines and (folder / "metrics.jsonl").stat().st_size:
        raise UsageError(f"{folder}/metrics.jsonl holds no line of metrics; give a run folder of train.py")
    metrics = columns(lines)
    last = max((step for step in metrics.get("step", ()) if step is not None), default=0)
    files = _files_by_step(folder / "trajectories")
    files = {step: paths for step, paths in files.items() if step <= last}  # later ones were rolled back
    shown = choose_steps(files, games=games)
    texts, costs = TokenTexts.of_run(folder), CallCosts(folder / "journal")
    groups: list[Row] = []
    for step in shown:
        try:
            groups += _groups(step, files[step], texts, costs)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise UsageError(
                f"{folder}/trajectories, step {step}: a line is not a game of train.py ({error!r}); move the "
                "files of this step away"
            ) from None
    rule = RULES.get(str(settings.get("rule")))
    return {
        "name": folder.resolve().name,
        "settings": {name: _setting(value) for name, value in settings.items()},
        "epsilon": rule.epsilon if rule else None,
        "metrics": metrics,
        "steps": {"all": len(files), "shown": len(shown)},
        "groups": groups,
    }


def _read_settings(path: Path) -> Row:
    """The settings of a run; {} if it has no file of them. Raises UsageError."""
    if not path.exists():
        return {}
    try:
        settings = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        settings = "damaged"
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UsageError(f"{path} is not a file of settings; give a run folder of train.py")
    return {str(name): value for name, value in settings.items()}


def columns(lines: list[Row]) -> dict[str, list[float | None]]:
    """The metric lines as one list per metric (None: not in a line), with Wilson intervals of validation."""
    lines = [{name: value if _is_number(value) else None for name, value in line.items()} for line in lines]
    names = sorted({name for line in lines for name in line})
    table = {name: [line.get(name) for line in lines] for name in names}
    for name in ("val/em", "val/format"):
        if name in table and "val/n" in table and f"{name}_low" not in table:
            bounds = [_wilson(line.get(name), line.get("val/n")) for line in lines]
            table[f"{name}_low"] = [low for low, _ in bounds]
            table[f"{name}_high"] = [high for _, high in bounds]
    return table


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _wilson(rate: float | None, n: float | None) -> tuple[float | None, float | None]:
    return wilson(min(round(rate * n), n), int(n)) if rate is not None and n else (None, None)


def choose_steps(files: dict[int, list[Path]], *, games: int) -> list[int]:
    """The first step, the last one and others evenly between, with at most `games` games in all."""
    steps = sorted(files)
    if not steps:
        return []
    first = files[steps[0]]
    in_step = max(1, sum(path.read_bytes().count(b"\n") for path in first))
    bytes_in_step = max(1, sum(path.stat().st_size for path in files[steps[-1]]))
    room = max(1, min(games // in_step, MEGABYTES * 1_000_000 // bytes_in_step))
    if room >= len(steps):
        return steps
    if room == 1:
        return steps[-1:]
    return sorted({steps[round(n * (len(steps) - 1) / (room - 1))] for n in range(room)})


def _groups(step: int, paths: list[Path], texts: TokenTexts, costs: CallCosts) -> Iterator[Row]:
    """The groups of a step, one of each rank in turn, as the questions were assigned to the ranks."""
    groups_by_rank = [_split_groups(path) for path in paths]
    for groups in zip_longest(*groups_by_rank):
        for rows in filter(None, groups):
            question = rows[0]["question"]
            spans = [spans_of(row, texts) for row in rows]
            yield {
                "step": step,
                "id": question["id"],
                "dataset": question["dataset"],
                "question": question["text"],
                "answers": question["answers"],
                "opening": spans[0][0],
                "games": [_game(row, own[1:], costs) for row, own in zip(rows, spans, strict=True)],
            }


def _split_groups(path: Path) -> list[list[Row]]:
    """The rows of a trajectory file, by group."""
    by_group = groupby(_lines(path), key=lambda row: (row.get("group", 0), row["question"]["id"]))
    return [list(rows) for _, rows in by_group]


def _game(row: Row, spans: list[Row], costs: CallCosts) -> Row:
    session, sample = row["question"]["id"], row.get("sample", 0)
    broken = row["turns"][-1:] if row["stop"] == "env_error" else []  # the call of its last turn failed
    asked = [turn for turn in row["turns"] if turn["reply"] is not None] + broken
    return {
        **{name: row[name] for name in ("stop", "error", "answer", "reward", "advantage")},
        "calls": [
            {
                "latency": turn["latency"],
                **costs.find(session, sample, turn["action"]["prompt"], turn["reply"]),
            }
            for turn in asked
        ],
        "spans": spans,
    }


def _files_by_step(folder: Path) -> dict[int, list[Path]]:
    """The trajectory files of each step, in the order of the ranks."""
    files: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob("step-*-rank*.jsonl"):
        if match := re.fullmatch(r"step-(\d+)-rank(\d+)\.jsonl", path.name):
            files.setdefault(int(match[1]), []).append((int(match[2]), path))
    return {step: [path for _, path in sorted(ranked)] for step, ranked in files.items()}


def _lines(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file, NaN and Infinity as None.

    Lines that were cut short by a kill, or are no JSON objects for another reason, are skipped.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def _finite(text: str) -> float | None:
    """A number as in a file; None for 1e999, which JSON allows but cannot write."""
    number = float(text)
    return number if math.isfinite(number) else None


def _setting(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
