"""Where the CPU time of `python train.py` goes.

    OMP_NUM_THREADS=1 python -m benchmarks.mini_run --out FOLDER [further flags of train.py]

Trains in FOLDER and prints a table of CPU seconds, user and system, by part. The warm start is part of it if
runs/cache has no mini agent. The last line is JSON.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from prompt_r1.cli.markdown import markdown_table

STEP = "step: "  # before the names of the phases that `Clock` measures
Seconds = Counter[str]


@contextmanager
def timed(seconds: Seconds, part: str) -> Iterator[None]:
    """Add the CPU time spent inside to a part."""
    begin = time.process_time()
    try:
        yield
    finally:
        seconds[part] += time.process_time() - begin


def measure(seconds: Seconds, part: str, owner: ModuleType | type, name: str) -> None:
    """Replace a function of a module or class by one that adds its CPU time to a part."""
    function: Callable[..., Any] = getattr(owner, name)

    def timed_function(*arguments: object, **options: object) -> object:
        with timed(seconds, part):
            return function(*arguments, **options)

    setattr(owner, name, timed_function)


def run(arguments: list[str]) -> Seconds:
    """Train with these flags; the CPU seconds of the process so far by part, which do not overlap."""
    import train
    from prompt_r1.storage.run_log import Clock
    from prompt_r1.training import lifecycle, weights

    seconds = Seconds({"imports": time.process_time()})
    clock_phase = Clock.phase

    @contextmanager
    def phase(clock: Clock, name: str) -> Iterator[None]:
        with clock_phase(clock, name), timed(seconds, STEP + name):
            yield

    measure(seconds, "warm start", weights, "find_agent")
    measure(seconds, "report", lifecycle, "write_report")
    measure(seconds, "test", train, "compare_on_test")
    Clock.phase = phase  # type: ignore[method-assign]
    try:
        train.main(arguments)
    finally:
        Clock.phase = clock_phase  # type: ignore[method-assign]
    seconds["everything else"] = time.process_time() - seconds.total()
    return seconds


def main() -> None:
    """Print the parts, the longest first."""
    seconds = run(sys.argv[1:])
    total = seconds.total()
    rows = [[part, f"{spent:.1f}", f"{spent / total:.0%}"] for part, spent in seconds.most_common()]
    print("\n" + markdown_table(["part", "CPU s", "share"], [*rows, ["total", f"{total:.1f}", ""]], left=1))
    print(json.dumps({part: round(spent, 2) for part, spent in seconds.items()} | {"total": round(total, 2)}))


if __name__ == "__main__":
    main()
