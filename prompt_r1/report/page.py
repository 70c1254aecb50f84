"""The report as one HTML file.

Texts of models are data, never markup. They are in the page as JSON without any `<`, the script shows them
through textContent, and the content security policy allows only the hashes of our style and our script.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from prompt_r1.foreign import replace_file
from prompt_r1.report.payload import RunData, read_run

HERE = Path(__file__).parent
THEME = (HERE / "theme.css").read_text("utf-8")  # of the chat page too
SCRIPTS = (
    "text.js",
    "words.js",
    "chart.js",
    "curves.js",
    "tokens.js",
    "game.js",
    "systems.js",
    "games.js",
    "main.js",
)
GAMES = 8000  # per run; with more, the page takes seconds to load


def write_report(
    run: Path, other: Path | None = None, *, out: Path | None = None, games: int = GAMES
) -> Path:
    """Write the page of a run, or of two runs to compare; returns its path.

    The page has at most `games` games of each run: complete steps, evenly spread. A reader of the file sees
    the old page or the new one, never a part. Raises UsageError for a folder without a run.
    """
    folders = [run, other] if other else [run]
    name = f"report-with-{other.resolve().name}.html" if other else "report.html"
    path = out or run / name
    replace_file(path, page([read_run(folder, games=games) for folder in folders]).encode())
    return path


def page(runs: Sequence[RunData]) -> str:
    """The HTML page of one or two runs."""
    style = THEME + (HERE / "page.css").read_text("utf-8")
    script = "".join((HERE / name).read_text("utf-8") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # The data is inserted last, so that a %STYLE% in a text is not replaced.
    head, tail = (HERE / "page.html").read_text("utf-8").split("%DATA%")
    for name, text in (("%POLICY%", policy), ("%STYLE%", style), ("%SCRIPT%", script)):
        head, tail = head.replace(name, text), tail.replace(name, text)
    return head + as_json(runs) + tail


def as_json(data: object) -> str:
    """ASCII JSON without characters that are special in HTML; of records, their fields.

    Control characters of bidirectional texts and lone surrogates are escaped.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=vars)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
