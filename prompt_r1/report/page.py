"""The page: data, style and script in one HTML file that may load nothing and run nothing else.

Texts of models are data here, never markup: they lie in the page as JSON in which no `<` stands, the script
shows them with textContent, and the policy names the hashes of the one style and the one script that may act.
"""

import base64
import hashlib
import json
import os
from pathlib import Path

from prompt_r1.report.payload import read_run

HERE = Path(__file__).parent
SCRIPTS = ("text.js", "chart.js", "curves.js", "game.js", "games.js", "main.js")
GAMES = 8000  # of a run; a page of more takes seconds to load


def write_report(
    run: Path, other: Path | None = None, *, out: Path | None = None, games: int = GAMES
) -> Path:
    """Write the page of a run folder, or of two to compare; the file's path.

    At most `games` games of each run are in it: whole steps, evenly spread. Raises UsageError for a folder
    without a run.
    """
    folders = [run] if other is None else [run, other]
    name = "report.html" if other is None else f"report-with-{other.resolve().name}.html"
    path = out or run / name
    text = page({"runs": [read_run(folder, games=games) for folder in folders]})
    part = path.with_name(f".{path.name}.part")  # what a kill leaves, the next report writes over
    try:
        part.write_text(text, "utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def page(data: dict[str, object]) -> str:
    """The HTML of a payload."""
    style = (HERE / "page.css").read_text("utf-8")
    script = "".join((HERE / name).read_text("utf-8") for name in SCRIPTS)
    parts = {
        "POLICY": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": as_json(data),
    }
    # The data come last and are not searched again: a text that reads %STYLE% stays what it is.
    head, tail = (HERE / "page.html").read_text("utf-8").split("%DATA%")
    for part in ("POLICY", "STYLE", "SCRIPT"):
        head, tail = head.replace(f"%{part}%", parts[part]), tail.replace(f"%{part}%", parts[part])
    return head + parts["DATA"] + tail


def as_json(data: object) -> str:
    """JSON in ASCII (lone surrogates and bidi controls escaped) without any character that HTML minds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
