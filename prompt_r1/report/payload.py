"""The data of the report, read from a run folder: settings, curves, and groups of games.

A folder of evaluate.py, which holds predictions.jsonl and no curves, has one group for each question, with an
answer of each system.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import yaml

from prompt_r1.config.train import TrainConfig
from prompt_r1.errors import UsageError
from prompt_r1.foreign import check_no_links, is_finite_number
from prompt_r1.metrics.statistics import wilson
from prompt_r1.metrics.text import exact_match, math_match
from prompt_r1.report.costs import CallCosts, key_of_call
from prompt_r1.report.spans import TokenTexts, spans_of
from prompt_r1.report.verdict import verdict
from prompt_r1.reward import RULES

MEGABYTES = 120  # of trajectory files at most: they are read into memory
Row = dict[str, Any]


def read_run(folder: Path, *, games: int) -> Row:
    """The data of a run. Raises UsageError for a folder without a run, or with files of something else."""
    if not (folder / "metrics.jsonl").exists():
        if (folder / "predictions.jsonl").exists():
            return read_evaluation(folder, answers=games)
        raise UsageError(
            f"{folder}: there is no metrics.jsonl in it; give a run folder, such as runs/mini-seed0"
        )
    check_no_links(folder, skip=("wandb",))
    settings = _read_settings(folder / "config.yaml")
    lines = list(_lines(folder / "metrics.jsonl"))
    if not lines and (folder / "metrics.jsonl").stat().st_size:
        raise UsageError(f"{folder}/metrics.jsonl holds no line of metrics; give a run folder of train.py")
    metrics = columns(lines)
    last = int(max((step for step in metrics.get("step", ()) if step is not None), default=0))
    texts = TokenTexts.of_run(folder)
    groups: list[Row] = []
    files = _files_by_step(folder / "trajectories", "step", last=last)
    validations = _files_by_step(folder / "trajectories", "validation", last=last)
    shown = choose_steps(files, games=games)
    chosen = [("training", step, files[step]) for step in shown]
    chosen += [("validation", step, validations[step]) for step in choose_steps(validations, games=games)]
    tests = [(f"test {name}", last, paths) for name, paths in _test_files(folder / "trajectories").items()]
    for kind, step, paths in [*chosen, *tests]:
        try:
            groups += _groups(kind, step, paths, texts)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise UsageError(
                f"{folder}/trajectories, step {step}: a line is not a game of train.py ({error!r}); move the "
                "files of this step away"
            ) from None
    calls = [call for group in groups for game in group["games"] for call in game["calls"]]
    costs = CallCosts(folder / "journal", {call["key"] for call in calls})
    for call in calls:
        call |= costs.find(call.pop("key"))
    rule = RULES.get(str(settings.get("rule")))
    judged = verdict(metrics)
    return {
        "name": folder.resolve().name,
        "verdict": {"kind": judged.kind, "text": judged.text},
        "settings": {name: _setting(value) for name, value in settings.items()},
        "sections": setting_sections(),
        "epsilon": rule.epsilon if rule else None,
        "metrics": metrics,
        "step": last,
        "steps": {"all": len(files), "shown": len(shown)},
        "groups": merge_tests(groups),
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
    lines = [
        {name: number if is_finite_number(number) else None for name, number in line.items()}
        for line in lines
    ]
    names = sorted({name for line in lines for name in line})
    table = {name: [line.get(name) for line in lines] for name in names}
    for name in ("val/em", "val/format"):
        if name in table and "val/n" in table and f"{name}_low" not in table:
            bounds = [_wilson(line.get(name), line.get("val/n")) for line in lines]
            table[f"{name}_low"] = [low for low, _ in bounds]
            table[f"{name}_high"] = [high for _, high in bounds]
    return table


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


def _groups(kind: str, step: int, paths: list[Path], texts: TokenTexts) -> Iterator[Row]:
    """The groups of a step, one of each rank in turn, as the questions were assigned to the ranks."""
    groups_by_rank = [_split_groups(path) for path in paths]
    for groups in zip_longest(*groups_by_rank):
        for rows in filter(None, groups):
            question = rows[0]["question"]
            spans = [spans_of(row, texts) for row in rows]
            yield {
                "kind": kind,
                "step": step,
                "id": question["id"],
                "dataset": question["dataset"],
                "question": question["text"],
                "answers": question["answers"],
                "opening": spans[0][0],
                "games": [_game(row, own[1:]) for row, own in zip(rows, spans, strict=True)],
            }


def _split_groups(path: Path) -> list[list[Row]]:
    """The rows of a trajectory file, by group."""
    by_group = groupby(_lines(path), key=lambda row: (row.get("group", 0), row["question"]["id"]))
    return [list(rows) for _, rows in by_group]


def _game(row: Row, spans: list[Row]) -> Row:
    session, sample = row["question"]["id"], row.get("sample", 0)
    broken = row["turns"][-1:] if row["stop"] == "env_error" else []  # the call of its last turn failed
    asked = [turn for turn in row["turns"] if turn["reply"] is not None] + broken
    return {
        **{name: row[name] for name in ("stop", "error", "answer", "reward", "advantage")},
        "right": is_right(row["answer"], row["question"]),
        "player": "",
        "calls": [
            {
                "latency": turn["latency"],
                "key": key_of_call(session, sample, turn["action"]["prompt"], turn["reply"]),
            }
            for turn in asked
        ],
        "spans": spans,
    }


def is_right(answer: str | None, question: Row) -> bool | None:
    """Whether an answer equals a gold answer: exactly (EM), in mathematics also as a number.

    None for long texts such as summaries, for which only F1 means something.
    """
    kind = question.get("kind", "qa")
    if kind == "text":
        return None
    match = math_match if kind == "math" else exact_match
    return match(answer or "", question["answers"]) == 1


def read_evaluation(folder: Path, *, answers: int) -> Row:
    """The data of an evaluation: a group for each question, with an answer of each system."""
    groups: dict[tuple[str, str], Row] = {}
    lines = list(_lines(folder / "predictions.jsonl"))
    for row in lines[-answers:]:
        try:
            group = groups.setdefault((row["dataset"], row["id"]), _evaluated_group(row))
            group["games"].append(_evaluated_game(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{folder}/predictions.jsonl: a line is not an answer of evaluate.py ({error!r})"
            ) from None
    if not groups:
        raise UsageError(f"{folder}/predictions.jsonl holds no answers of evaluate.py")
    return {
        "name": folder.resolve().name,
        "verdict": None,
        "settings": {},
        "sections": [],
        "epsilon": None,
        "metrics": {},
        "step": 0,
        "steps": {"all": 1, "shown": 1},
        "groups": list(groups.values()),
    }


def _evaluated_group(row: Row) -> Row:
    texts = [str(row[name]) for name in ("id", "dataset", "question")]
    return {
        "kind": "evaluation",
        "step": 0,
        "id": texts[0],
        "dataset": texts[1],
        "question": texts[2],
        "answers": [str(answer) for answer in row["answers"]],
        "opening": {"text": texts[2], "tokens": 0},
        "games": [],
    }


def _evaluated_game(row: Row) -> Row:
    names = [str(row[name]) for name in ("method", "environment", "agent") if row[name]]
    answer = None if row["prediction"] is None else str(row["prediction"])
    call = {"in": row["tokens_in"], "out": row["tokens_out"], "usd": row["usd"], "count": row["calls"]}
    return {
        "stop": str(row["stop"]),
        "error": str(row["error"]),
        "answer": answer,
        "reward": None,
        "advantage": None,
        "right": is_right(answer, row),
        "player": ", ".join(names),
        "total": call,
        "calls": [],
        "spans": [{"text": str(row["raw"]), "tokens": 0, "dialogue": True}],
    }


def _files_by_step(folder: Path, kind: str, *, last: int) -> dict[int, list[Path]]:
    """The trajectory files of each step up to `last`, in the order of the ranks; later ones were undone."""
    files: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob(f"{kind}-*-rank*.jsonl"):
        match = re.fullmatch(kind + r"-(\d+)-rank(\d+)\.jsonl", path.name)
        if match and int(match[1]) <= last:
            files.setdefault(int(match[1]), []).append((int(match[2]), path))
    return {step: [path for _, path in sorted(ranked)] for step, ranked in files.items()}


def _test_files(folder: Path) -> dict[str, list[Path]]:
    """The files of the test games by their agent: untrained, trained."""
    files = {name: sorted(folder.glob(f"test-{name}-rank*.jsonl")) for name in ("untrained", "trained")}
    return {name: paths for name, paths in files.items() if paths}


def merge_tests(groups: list[Row]) -> list[Row]:
    """Join the test games of a question, one of each agent, to one group."""
    merged: list[Row] = []
    tests: dict[tuple[str, str], Row] = {}
    for group in groups:
        kind, _, agent = group["kind"].partition(" ")
        if kind != "test":
            merged.append(group)
            continue
        for game in group["games"]:
            game["player"] = f"{agent} agent"
        first = tests.setdefault((group["dataset"], group["id"]), group | {"kind": "test", "games": []})
        first["games"] += group["games"]
    return merged + list(tests.values())


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


def setting_sections() -> list[Row]:
    """The settings by the headings of --help-all, in its order, with their help lines."""
    own = TrainConfig.__annotations__
    sections: list[Row] = []
    for f in sorted(fields(TrainConfig), key=lambda f: f.name not in own):
        if f.metadata["group"]:
            sections.append({"title": f.metadata["group"], "settings": []})
        sections[-1]["settings"].append([f.name, f.metadata["help"]])
    return sections


def _setting(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
