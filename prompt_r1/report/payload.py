"""The data of the report.

A folder of evaluate.py, which holds predictions.jsonl and no curves, has one group for each question, with an
answer of each system.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from prompt_r1.config.yaml_files import read_mapping
from prompt_r1.errors import UsageError
from prompt_r1.foreign import check_no_links, is_finite_number, json_object
from prompt_r1.metrics.em_f1 import exact_match, math_match
from prompt_r1.report.spans import Span, TokenTexts, spans_of
from prompt_r1.report.verdict import Columns, Verdict, columns, verdict
from prompt_r1.reward import RULES

MEGABYTES = 120  # of trajectory files at most: they are read into memory
NOT_A_ROW = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
Row = Mapping[str, Any]  # a line of a file of the run


@dataclass
class ShownGame:
    """A game of a run, or an answer of an evaluation."""

    stop: str
    error: str
    answer: str | None
    right: bool | None  # None: a long text, which is neither right nor wrong
    spans: list[Span]  # after the opening
    reward: Row | None = None
    advantage: float | None = None
    player: str = ""  # the system of an evaluation, or the agent of a test
    calls: int = 0
    seconds: float = 0.0  # that it waited for them
    usd: float = 0.0


@dataclass
class ShownGroup:
    """The games of one question in one step."""

    kind: str  # training, validation, test or evaluation
    step: int
    id: str
    dataset: str
    question: str
    answers: list[str]
    opening: Span
    games: list[ShownGame]


@dataclass
class RunData:
    """What the report shows of a run, or of an evaluation, which has no verdict."""

    name: str
    groups: list[ShownGroup]
    verdict: Verdict | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    epsilon: float | None = None  # the format score at which the reward's gate opens
    metrics: Columns = field(default_factory=dict)
    step: int = 0  # the last one
    steps: int = 1
    steps_shown: int = 1
    results: Mapping[str, Row] = field(default_factory=dict)  # of an evaluation, by system: results.json
    tables: list[list[list[str]]] = field(default_factory=list)  # the cells of those in test.md


def read_run(folder: Path, *, games: int) -> RunData:
    """The data of a run. Raises UsageError for a folder without a run, or with files of something else."""
    if not (folder / "metrics.jsonl").exists():
        if (folder / "predictions.jsonl").exists():
            return _read_evaluation(folder, answers=games)
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
    steps = _files_by_step(folder / "trajectories", "step", last=last)
    shown = choose_steps(steps, games=games)
    rule = RULES.get(str(settings.get("rule")))
    return RunData(
        name=folder.resolve().name,
        groups=_read_groups_of_run(folder, {step: steps[step] for step in shown}, last=last, games=games),
        verdict=verdict(metrics),
        settings={
            name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in settings.items()
        },
        epsilon=rule.epsilon if rule else None,
        metrics=metrics,
        step=last,
        steps=len(steps),
        steps_shown=len(shown),
        tables=_read_tables(folder / "test.md"),
    )


def _read_tables(path: Path) -> list[list[list[str]]]:
    """The cells of the Markdown tables of a test, by table and row."""
    if not path.is_file():
        return []
    lines = path.read_text("utf-8", "replace").replace("**", "").splitlines()
    rows = [line[2:-2].split(" | ") for line in lines if not line.startswith("|---")]
    return [list(table) for filled, table in groupby(rows, lambda row: len(row) > 1) if filled]


def _read_groups_of_run(
    folder: Path, steps: Mapping[int, Sequence[Path]], *, last: int, games: int
) -> list[ShownGroup]:
    """The groups of training steps, then of validations and of the test. Raises UsageError."""
    trajectories, texts = folder / "trajectories", TokenTexts.of_run(folder)

    def read(kind: str, step: int, paths: Sequence[Path], player: str = "") -> list[ShownGroup]:
        try:
            return list(_read_groups(kind, step, paths, texts, player))
        except NOT_A_ROW as error:
            raise UsageError(
                f"{folder}/trajectories, step {step}: a line is not a game of train.py ({error!r}); move the "
                "files of this step away"
            ) from None

    groups = [group for step, paths in steps.items() for group in read("training", step, paths)]
    validations = _files_by_step(trajectories, "validation", last=last)
    for step in choose_steps(validations, games=games):
        groups += read("validation", step, validations[step])
    tests: dict[tuple[str, str], ShownGroup] = {}  # by question, with a game of each agent
    for agent in ("untrained", "trained"):
        paths = list(trajectories.glob(f"test-{agent}-rank*.jsonl"))
        paths.sort(key=lambda path: (len(path.name), path.name))  # rank 2 before rank 10
        for group in read("test", last, paths, f"{agent} agent"):
            first = tests.setdefault((group.dataset, group.id), group)
            if first is not group:
                first.games += group.games
    return groups + list(tests.values())


def _read_settings(path: Path) -> Row:
    """The settings of a run; {} if it has no file of them. Raises UsageError."""
    if not path.exists() or not path.stat().st_size:
        return {}
    try:
        return read_mapping(path)
    except UsageError:
        raise UsageError(f"{path} is not a file of settings; give a run folder of train.py") from None


def choose_steps(files: Mapping[int, Sequence[Path]], *, games: int) -> list[int]:
    """The first step, the last one and others evenly between, with at most `games` games in all."""
    steps = sorted(files)
    if not steps:
        return []
    in_step = max(1, sum(path.read_bytes().count(b"\n") for path in files[steps[0]]))
    bytes_in_step = max(1, sum(path.stat().st_size for path in files[steps[-1]]))
    room = max(1, min(games // in_step, MEGABYTES * 1_000_000 // bytes_in_step))
    if room >= len(steps):
        return steps
    if room == 1:
        return steps[-1:]
    return sorted({steps[round(n * (len(steps) - 1) / (room - 1))] for n in range(room)})


def _files_by_step(folder: Path, kind: str, *, last: int) -> dict[int, list[Path]]:
    """The trajectory files of each step up to `last`, in the order of the ranks; later ones were undone."""
    files: dict[int, dict[int, Path]] = {}
    for path in folder.glob(f"{kind}-*-rank*.jsonl"):
        match = re.fullmatch(kind + r"-(\d+)-rank(\d+)\.jsonl", path.name)
        if match and int(match[1]) <= last:
            files.setdefault(int(match[1]), {})[int(match[2])] = path
    return {step: [path for _, path in sorted(by_rank.items())] for step, by_rank in files.items()}


def _read_groups(
    kind: str, step: int, paths: Sequence[Path], texts: TokenTexts | None, player: str
) -> Iterator[ShownGroup]:
    """The groups of a step, one of each rank in turn, as the questions were assigned to the ranks."""
    for groups in zip_longest(*map(_rows_by_group, paths)):
        for rows in filter(None, groups):
            question = rows[0]["question"]
            identity = question["id"], question["dataset"], question["text"], question["answers"]
            spans = [spans_of(row, texts) for row in rows]
            games = [_game(row, own[1:], player) for row, own in zip(rows, spans, strict=True)]
            yield ShownGroup(kind, step, *identity, spans[0][0], games)


def _rows_by_group(path: Path) -> list[list[Row]]:
    by_group = groupby(_lines(path), key=lambda row: (row.get("group", 0), row["question"]["id"]))
    return [list(rows) for _, rows in by_group]


def _game(row: Row, spans: list[Span], player: str) -> ShownGame:
    """A game of a trajectory file. Its replies get the time of their calls."""
    asked = [turn for turn in row["turns"] if turn["reply"] is not None]
    replies = (span for span in spans if not span.written)
    for span, turn in zip(replies, asked, strict=False):  # a reply that did not fit has no span
        span.seconds = turn["latency"]
    # In a broken game, the call of the last turn failed.
    calls = asked + (row["turns"][-1:] if row["stop"] == "env_error" else [])
    return ShownGame(
        stop=row["stop"],
        error=row["error"],
        answer=row["answer"],
        right=is_right(row["answer"], row["question"]),
        spans=spans,
        reward=row["reward"],
        advantage=row["advantage"],
        player=player,
        calls=len(calls),
        seconds=sum(turn["latency"] for turn in calls),
        usd=row.get("usd", 0.0),  # older runs have it only in their journal
    )


def is_right(answer: str | None, question: Row) -> bool | None:
    """Whether an answer equals a gold answer: exactly (EM), in mathematics also as a number.

    None for long texts such as summaries, for which only F1 means something.
    """
    kind = question.get("kind", "qa")
    if kind == "text":
        return None
    match = math_match if kind == "math" else exact_match
    return match(answer or "", question["answers"]) == 1


def _read_evaluation(folder: Path, *, answers: int) -> RunData:
    """The data of an evaluation: a group for each question, with an answer of each system."""
    groups: dict[tuple[str, str], ShownGroup] = {}
    try:
        results, rows = _results(folder), _newest_answers(folder)
        names = {tuple(means["system"]): name for name, means in results.items() if "system" in means}
        for row in rows[-answers:]:
            identity = str(row["id"]), str(row["dataset"]), str(row["question"])
            golds = [str(answer) for answer in row["answers"]]
            empty = ShownGroup("evaluation", 0, *identity, golds, Span(identity[2]), [])
            game = ShownGame(
                stop=str(row["stop"]),
                error=str(row["error"]),
                answer=None if row["prediction"] is None else str(row["prediction"]),
                right=is_right(row["prediction"], row),
                spans=[Span(str(row["raw"]))],
                player=names.get(_system(row)) or ", ".join(filter(None, _system(row))),
                calls=row["calls"],
                usd=row["usd"],
            )
            groups.setdefault(identity[:2], empty).games.append(game)
    except NOT_A_ROW as error:
        raise UsageError(
            f"{folder}/predictions.jsonl: a line is not an answer of evaluate.py ({error!r})"
        ) from None
    if not groups:
        raise UsageError(f"{folder}/predictions.jsonl holds no answers of evaluate.py")
    return RunData(folder.resolve().name, list(groups.values()), results=results)


def _newest_answers(folder: Path) -> list[Row]:
    """The last answer of each system to a question, with its newest settings: failed calls are repeated."""
    rows = list(_lines(folder / "predictions.jsonl"))
    newest = {_system(row): row.get("setting") for row in rows}
    kept = [row for row in rows if row.get("setting") == newest[_system(row)]]
    return list({(_system(row), row["dataset"], row["id"], row.get("sample")): row for row in kept}.values())


def _system(row: Row) -> tuple[str, ...]:
    return str(row["method"]), str(row["environment"]), str(row["agent"])


def _results(folder: Path) -> dict[str, Row]:
    """The means of each system by its name, which evaluate.py writes at its end."""
    path = folder / "results.json"
    found = json_object(path.read_bytes() if path.exists() else b"")
    return {
        name: {key: value for key, value in means.items() if key == "system" or is_finite_number(value)}
        for name, means in found.items()
        if isinstance(means, dict)
    }


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
