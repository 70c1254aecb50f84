"""The report as one HTML file that loads nothing and runs only its own script.

Texts of models are data, never markup. They are in the page as JSON without any `<`, the script shows them
through textContent, and the content security policy allows only the hashes of our style and our script.
"""

import base64
import hashlib
import json
import os
from pathlib import Path

from prompt_r1.errors import UsageError
from prompt_r1.report.payload import read_run

HERE = Path(__file__).parent
SCRIPTS = ("text.js", "words.js", "chart.js", "curves.js", "game.js", "games.js", "main.js")
GAMES = 8000  # per run; with more, the page takes seconds to load
MOST_RUNS = 6  # as many as page.css has colours


def write_report(run: Path, *others: Path, out: Path | None = None, games: int = GAMES) -> Path:
    """Write the page of a run, or of several runs to compare; returns its path.

    The page has at most `games` games of each run: complete steps, evenly spread. Raises UsageError for a
    folder without a run, and for more than MOST_RUNS.
    """
    if len(others) >= MOST_RUNS:
        raise UsageError(f"a report compares at most {MOST_RUNS} runs, not {1 + len(others)}")
    name = "report.html"
    if others:
        more = f"-and-{len(others) - 1}-more" if len(others) > 1 else ""
        name = f"report-with-{others[0].resolve().name}{more}.html"
    path = out or run / name
    write_page(path, {"runs": [read_run(folder, games=games) for folder in (run, *others)]})
    return path


def write_page(path: Path, data: dict[str, object]) -> None:
    """Write the page with this data; a reader sees the old file or the new one, never a part."""
    text = page(data)
    part = path.with_name(f".{path.name}.part")  # renamed at the end, so that a kill leaves no broken report
    try:
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8") as file:  # "x" follows no symbolic link
            file.write(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def page(data: dict[str, object]) -> str:
    """The HTML page with this data."""
    style = (HERE / "page.css").read_text("utf-8")
    script = "".join((HERE / name).read_text("utf-8") for name in SCRIPTS)
    parts = {
        "POLICY": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": as_json(data),
    }
    # The data is inserted last, so that a %STYLE% in a text is not replaced.
    head, tail = (HERE / "page.html").read_text("utf-8").split("%DATA%")
    for part in ("POLICY", "STYLE", "SCRIPT"):
        head, tail = head.replace(f"%{part}%", parts[part]), tail.replace(f"%{part}%", parts[part])
    return head + parts["DATA"] + tail


def as_json(data: object) -> str:
    """ASCII JSON without characters that are special in HTML. Bidi controls and surrogates are escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
