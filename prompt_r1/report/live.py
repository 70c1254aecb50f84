"""Keep the report of a run up to date while it trains: `python -m prompt_r1.report RUN --live`."""

import time
from collections.abc import Callable
from pathlib import Path

from prompt_r1.errors import UsageError
from prompt_r1.report.page import write_page
from prompt_r1.report.payload import read_run

RELOAD_SECONDS = 10.0  # between two readings of the page by the browser
FILE = "report-live.html"  # beside report.html, which train.py writes


def follow(
    run: Path,
    *,
    out: Path | None,
    games: int,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the page whenever metrics.jsonl has changed, until the last step is logged or Ctrl-C.

    An open page reloads itself. The last one no longer does. Raises UsageError for a folder that is no run.
    """
    if not run.is_dir():
        raise UsageError(f"{run}: there is no such folder; give a run folder, such as runs/mini-seed0")
    metrics, path = run / "metrics.jsonl", out or run / FILE
    if not metrics.exists():
        say(f"Waiting for the first step of {run}")
    seen: tuple[int, int] | None = None
    try:
        while True:
            state = (metrics.stat().st_size, metrics.stat().st_mtime_ns) if metrics.exists() else None
            begin = time.monotonic()
            if state != seen:
                data = read_run(run, games=games)
                steps, at = data["settings"].get("steps"), data["step"]
                ended = steps is not None and str(at) == steps
                write_page(path, {"runs": [data], "live": 0 if ended else RELOAD_SECONDS})
                if seen is None:
                    say(f"{path}: open it in a browser; it follows the run until Ctrl-C")
                seen = state
                if ended:
                    say(f"The last step, {at}, is logged; {run}/report.html will show the test too")
                    return
            # A page that takes long to write is written less often.
            sleep(max(1.0, 10 * (time.monotonic() - begin)))
    except KeyboardInterrupt:
        if seen is not None:
            write_page(path, {"runs": [read_run(run, games=games)]})
