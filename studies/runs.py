"""What the studies share that train agents: programs in new processes, games as text, and curves."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prompt_r1.errors import UsageError
from prompt_r1.f1 import exact_match
from prompt_r1.programs.command_line import command

ROOT = Path(__file__).parents[1]
COST_FILE = "cost.jsonl"  # in a run folder: CPU minutes and memory each time that the program ran

Row = Mapping[str, Any]  # a game as a line of trajectories/*.jsonl


def run(program: Sequence[str], folder: Path) -> None:
    """Run a program of this repository in a new process, and write down its cost in its folder.

    `program` has its name, as in "train.py" or "-m studies.parts", and its flags. Raises UsageError if it
    fails. Started again after a stop, the programs resume.
    """
    process = subprocess.Popen([sys.executable, *program], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if folder.is_dir():
        minutes = (usage.ru_utime + usage.ru_stime) / 60
        cost = {
            "exit_code": process.returncode,
            "cpu_minutes": minutes,
            "gigabytes": usage.ru_maxrss / 1e6,  # Linux counts kilobytes.
        }
        with (folder / COST_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(cost) + "\n")
    if process.returncode:
        raise UsageError(f"exit code {process.returncode}, see above: {command(*program)}")


def has_ended(folder: Path) -> bool:
    """Whether the program that writes this folder has once run to its end."""
    path = folder / COST_FILE
    return path.is_file() and any(line["exit_code"] == 0 for line in read_lines(path))


def cost_of(folder: Path) -> tuple[float, float]:
    """The CPU minutes of all runs of a folder's program, and the most memory, in GB."""
    costs = read_lines(folder / COST_FILE)
    return sum(cost["cpu_minutes"] for cost in costs), max(cost["gigabytes"] for cost in costs)


def read_lines(path: Path) -> list[Row]:
    """The objects in a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def em_of(game: Row) -> float:
    """Exact match of a game's answer, 0 or 1."""
    return exact_match(game["answer"] or "", game["question"]["answers"])


def dialogue(game: Row) -> str:
    """A game as text, with its gold answers and its reward."""
    question = game["question"]
    lines = [f"question     {question['text']} (gold: {' | '.join(question['answers'])})"]
    for turn in game["turns"]:
        text = turn["text"].replace("\n", " ")
        lines.append(f"agent        {text}")
        if turn["reply"] is not None:
            lines.append(f"environment  {turn['reply']}")
    lines.append(f"reward       {game['reward']['total']:.2f}, stop: {game['stop']}")
    return "\n".join(lines)


# Colours that people with a colour-vision deficiency can tell apart (Okabe and Ito).
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8a857c"
WIDTH, HEIGHT, GAP = 118, 120, 22  # of a panel of a figure, in pixels, and between panels
LEFT, TOP = 34, 58


@dataclass(frozen=True)
class Line:
    """How the curves of one quantity look, and its name in the legend."""

    label: str
    colour: str
    dashes: str = "none"  # as in `stroke-dasharray`


@dataclass(frozen=True)
class Panel:
    """A small chart. Each curve is a list of points (x, y) with y from 0 to 1."""

    title: str
    curves: Sequence[tuple[Line, Sequence[tuple[float, float]]]]
    last_x: str  # what stands below the end of the x axis, whose length is that of the longest curve


def figure(title: str, lines: Sequence[Line], panels: Sequence[Panel], *, width: int = WIDTH) -> str:
    """An SVG with a legend, and panels of this width side by side."""
    total = LEFT + len(panels) * (width + GAP)
    legend_width = max(110, *(30 + 7 * len(line.label) for line in lines))
    total = max(total, LEFT + legend_width * len(lines))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {TOP + HEIGHT + 30}" role="img">',
        f"<title>{title}</title>",
        "<style>svg { background: #fbfaf7; font: 12px system-ui, sans-serif; } text { fill: #1d1c1a; }",
        ".grid { stroke: #e3dfd6; } @media (prefers-color-scheme: dark) { svg { background: #171614; }",
        "text { fill: #ece8df; } .grid { stroke: #37342e; } }</style>",
    ]
    for number, line in enumerate(lines):
        x = LEFT + legend_width * number
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="18" y2="18" {_stroke(line)}/>')
        parts.append(f'<text x="{x + 30}" y="22">{line.label}</text>')
    for value in (0, 0.5, 1):
        parts.append(f'<text x="{LEFT - 8}" y="{_y(value) + 4:g}" text-anchor="end">{value}</text>')
    for number, panel in enumerate(panels):
        parts += _drawn(panel, left=LEFT + number * (width + GAP), width=width)
    return "\n".join([*parts, "</svg>", ""])


def _drawn(panel: Panel, *, left: int, width: int) -> list[str]:
    """The lines of the SVG for one panel."""
    parts = [f'<text x="{left + width / 2:g}" y="{TOP - 10}" text-anchor="middle">{panel.title}</text>']
    for value in (0, 0.5, 1):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{left + width}" y1="{_y(value):g}" y2="{_y(value):g}"/>'
        )
    longest = max(x for _, points in panel.curves for x, _ in points)
    for line, points in panel.curves:
        drawn = " ".join(f"{left + width * x / longest:.1f},{_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{drawn}" fill="none" {_stroke(line)}/>')
    bottom = TOP + HEIGHT + 18
    parts.append(f'<text x="{left}" y="{bottom}">0</text>')
    parts.append(f'<text x="{left + width}" y="{bottom}" text-anchor="end">{panel.last_x}</text>')
    return parts


def _y(value: float) -> float:
    """The height of a value from 0 to 1 in the figure, in pixels from its top."""
    return TOP + HEIGHT * (1 - value)


def _stroke(line: Line) -> str:
    return f'stroke="{line.colour}" stroke-width="1.6" stroke-dasharray="{line.dashes}"'
