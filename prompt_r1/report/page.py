"""The report as one HTML file: an autoescaped template, whose policy allows only our style and our script."""

import base64
import fnmatch
import hashlib
import math
from pathlib import Path

from jinja2 import Environment, StrictUndefined, UndefinedError
from markupsafe import Markup

from prompt_r1.agent.names import exported_step
from prompt_r1.errors import UsageError
from prompt_r1.foreign import replace_file
from prompt_r1.report.curves import Lines, charts_of, points_of
from prompt_r1.report.games import MOST_GROUPS, NOT_A_ROW, is_right, read_groups
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.terminal import printable

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


def write_report(run: Path, *, out: Path | None = None) -> Path:
    """Write the page of a run; returns its path. Raises UsageError for a folder without a run."""
    path = out or run / "report.html"
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
        groups = read_groups(run, best=best)
        return environment.from_string((HERE / "page.html").read_text("utf-8")).render(
            name=run.resolve().name,
            policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'",
            style=Markup(style),
            script=Markup(script),
            result=_result(lines, best),
            counts=_counts(lines),
            settings=_text(run / "config.yaml"),
            test=_cells(_text(run / "test.md")),
            charts=charts_of(lines),
            groups=groups,
            is_right=is_right,
            most=MOST_GROUPS,
            sources=list(dict.fromkeys(group.source for group in groups)),
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


def _cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, its header first."""
    rows = [line[1:-1].split(" | ") for line in table.splitlines() if not line.startswith("| ---")]
    return [[cell.strip(" *").replace(r"\|", "|") for cell in row] for row in rows]


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.is_file() else ""
