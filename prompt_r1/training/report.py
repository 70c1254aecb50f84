"""The report as one HTML file: an autoescaped template, whose policy allows only our style and our script.

It shows curves of metrics as static SVG charts, and games from the files of the run.
"""

if __name__ == "__main__":  # before the imports below, which an old Python or an empty environment lacks
    from prompt_r1.programs.installation import check_installation

    check_installation()

import base64
import fnmatch
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, UndefinedError
from markupsafe import Markup

from prompt_r1.errors import UsageError
from prompt_r1.f1 import exact_match
from prompt_r1.pair.names import exported_step
from prompt_r1.programs.command_line import Parser, program_name, run_program
from prompt_r1.programs.files import json_object, replace_file
from prompt_r1.programs.text import printable
from prompt_r1.training.log import read_metrics

HERE = Path(__file__).parent
# Sums over the run, by label.
COUNTS = {
    "games trained": "games",
    "calls sent": "env/paid",
    "calls from the journal": "env/reused",
    "requests retried": "env/failed_requests",
    "calls failed": "env/errors",
    "replies filtered, cut or empty": "env/outcomes/*",
}
LEFT, RIGHT, TOP, BOTTOM = 40, 331, 9, 151  # of the axes in page.html, in pixels

# Title, explanation, metrics with labels, and what the vertical axis reaches at least.
CURVES: list[tuple[str, str, dict[str, str], float]] = [
    ("Validation EM", "Exactly right answers in greedy games of held-out questions.", {"val/em": ""}, 1),
    ("Reward", "Mean of the sampled games.", {"reward/mean": ""}, 1),
    ("Sampled EM", "Games, and questions with a right game.", {"em": "game", "em/any": "question"}, 1),
    ("Well-formed games", "One action in every turn, and an answer at the end.", {"format": ""}, 1),
    ("Groups without spread, or lost", "Nothing is learned from either.",
     {"groups/no_spread": "without spread", "groups/dropped": "lost"}, 1),
    ("Turns", "At 1, the agent answers without asking.", {"turns": ""}, 1),
    ("KL to the start", "Nats per token, of eq. 17.", {"kl": "mean", "kl_median": "median"}, 0),
    ("Entropy", "Nats per token. Near 0 there is no exploration.", {"entropy": ""}, 0),
    ("Log-probability gap", "Engine against trainer, nats.", {"engine/logprob_gap": ""}, 0),
    ("Calls", "", {"env/paid": "sent", "env/reused": "from the journal", "env/errors": "failed"}, 0),
    ("Seconds of a step", "", {"time/rollout": "rollout", "time/update": "update"}, 0),
]  # fmt: skip
MOST_GROUPS = 12  # shown of a step
NOT_A_ROW = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
Row = Mapping[str, Any]  # a game as a line of trajectories/*.jsonl
Lines = Sequence[Mapping[str, float]]  # of metrics.jsonl


def write_report(run: Path) -> Path:
    """Write the page of a run; returns its path. Raises UsageError for a folder without a run."""
    path = run / "report.html"
    replace_file(path, page(run).encode())
    return path


def page(run: Path) -> str:
    """The HTML page of a run."""
    file = run / "metrics.jsonl"
    if not file.exists():
        raise UsageError(f"{run}: there is no metrics.jsonl; give a run folder, such as runs/mini-seed0")
    lines = read_metrics(run)
    if not lines and file.stat().st_size:
        raise UsageError(f"{file} holds no line of metrics; give a run folder of train.py")
    style, script = ((HERE / name).read_text("utf-8") for name in ("page.css", "page.js"))
    best = exported_step(run / "agent")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    try:
        return environment.from_string((HERE / "page.html").read_text("utf-8")).render(
            name=run.resolve().name,
            policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'",
            style=Markup(style),
            script=Markup(script),
            result=_result(lines, best),
            counts=_counts(lines),
            settings=_text(run / "config.yaml"),
            test=_text(run / "test.md"),
            charts=charts_of(lines),
            groups=read_groups(run, best=best),
            is_right=is_right,
            most=MOST_GROUPS,
        )
    except (UndefinedError, *NOT_A_ROW) as error:
        raise UsageError(
            f"{run}/trajectories: a line of the steps shown is not a game of train.py ({error!r})"
        ) from None


def _shown(value: object) -> object:
    """A value of the template; texts without characters that hide or reorder others."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _result(lines: Lines, best: int) -> str:
    """The first and the best validation, or the first and the last reward."""
    validated, rewards = dict(points_of(lines, "val/em")), points_of(lines, "reward/mean")
    if len(validated) > 1 and best in validated:
        first = min(validated)
        return f"Validation EM {validated[first]:.3f} → {validated[best]:.3f} at step {best}"
    return f"Reward {rewards[0][1]:.3f} → {rewards[-1][1]:.3f}" if rewards else "No step has been trained yet"


def _counts(lines: Lines) -> dict[str, int]:
    """How many steps, games and calls the run has had, by label."""
    counts = {"steps": int(max((line["step"] for line in lines), default=0))}
    for label, pattern in COUNTS.items():
        values = (line[name] for line in lines for name in fnmatch.filter(line, pattern))
        counts[label] = round(sum(filter(math.isfinite, values)))
    return counts


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.is_file() else ""


@dataclass(frozen=True)
class Chart:
    """A chart: its polylines as points in pixels by label, and the texts beside its axes."""

    title: str
    about: str
    curves: list[tuple[str, str]]
    last_step: str
    values: list[str]  # at the bottom, in the middle and at the top


def charts_of(lines: Lines) -> list[Chart]:
    """The charts of all metrics that were measured."""
    last_step = max([1.0, *(line["step"] for line in lines)])
    charts = []
    for title, about, names, reach in CURVES:
        points_by_label = {label: points_of(lines, name) for name, label in names.items()}
        values = [value for points in points_by_label.values() for _, value in points]
        if values:
            low, high = min(0.0, *values), max(reach, *values) or 1.0
            curves = [
                (f"{label} {points[-1][1]:.3g}".strip(), _polyline(points, last_step, low, high))
                for label, points in points_by_label.items()
                if points
            ]
            # Five characters have room: 0.5, 1e-05.
            marks = [low, (low + high) / 2, high]
            shown = [f"{mark:{'.0e' if 0 < abs(mark) < 1e-2 else '.3g'}}" for mark in marks]
            charts.append(Chart(title, about, curves, f"{last_step:g}", shown))
    return charts


def points_of(lines: Lines, name: str) -> list[tuple[float, float]]:
    """Step and value wherever a metric was measured."""
    return [(line["step"], line[name]) for line in lines if math.isfinite(line.get(name, math.nan))]


def _polyline(points: Sequence[tuple[float, float]], last_step: float, low: float, high: float) -> str:
    pixels = (
        (LEFT + step / last_step * (RIGHT - LEFT), BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP))
        for step, value in points
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)


@dataclass
class ShownGroup:
    """The games of one question in one step, such as "training step 3"."""

    source: str
    games: list[Row]

    @property
    def right(self) -> int:
        return sum(is_right(game) is True for game in self.games)

    @property
    def is_uniform(self) -> bool:
        """Whether it was not trained on, or has only right or only wrong games."""
        trained = any(game["advantage"] for game in self.games)
        return not trained or self.right in (0, len(self.games))


def is_right(game: Row) -> bool | None:
    """Whether the answer equals a gold answer; None for long texts, for which only F1 means something."""
    answer, question = game["answer"], game["question"]
    return None if question["kind"] == "text" else exact_match(answer or "", question["answers"]) == 1


def read_groups(folder: Path, *, best: int) -> list[ShownGroup]:
    """The training games of the first, middle, last and best step, and the validation games of the best.

    Groups of right and wrong games come first, of which something is learned. Lines that were cut short by a
    kill are skipped. Raises an error of NOT_A_ROW for a line that is no game.
    """
    files = sorted((folder / "trajectories").glob("*-rank*.jsonl"))
    by_name = groupby(files, key=lambda path: path.name.partition("-rank")[0])  # such as step-000003
    played = {name: list(of_ranks) for name, of_ranks in by_name}
    steps = [name for name in played if name.startswith("step-")]
    wanted = {f"step-{best:06d}", f"validation-{best:06d}"}
    if steps:
        wanted |= {steps[0], steps[len(steps) // 2], steps[-1]}
    groups: list[ShownGroup] = []
    for name in sorted(wanted & played.keys()):
        kind, step = name.split("-")
        source = f"{'training' if kind == 'step' else kind} step {int(step)}"
        lines = (line for path in played[name] for line in path.read_text("utf-8", "replace").splitlines())
        rows = filter(None, map(json_object, lines))
        by_question = groupby(rows, key=lambda row: (row["group"], row["question"]["id"]))
        of_step = [ShownGroup(source, list(games)) for _, games in by_question]
        groups += sorted(of_step, key=attrgetter("is_uniform"))[:MOST_GROUPS]
    return sorted(groups, key=attrgetter("is_uniform"))


def main(arguments: list[str]) -> None:
    """Write the report from a command line."""
    parser = Parser(program_name(), description="Write RUN/report.html, the report of a run.")
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/mini-seed0")
    path = write_report(parser.parse_args(arguments).run)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
