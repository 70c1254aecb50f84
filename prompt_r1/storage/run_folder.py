"""The folder of a run: which one it is, that no other run writes to it, and its metric lines after a stop."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.errors import UsageError
from prompt_r1.storage.checkpoint import checkpoints_of

LOCK = ".lock"


def open_run(config: TrainConfig, name: str) -> Path:
    """The folder that the run writes to: auto goes on in it, DIR elsewhere, never begins a new one.

    Raises UsageError rather than write into a folder that holds another run.
    """
    run = Path(config.out or f"runs/{name}-seed{config.seed}")
    if config.resume not in ("auto", "never"):
        run = Path(config.resume)
        if not checkpoints_of(run):
            raise UsageError(f"--resume {run}: there is no checkpoint in it")
    elif config.resume == "never" and (run / "config.yaml").exists():
        if config.out:
            raise UsageError(f"--resume never: {run} holds a run already; choose another --out or delete it")
        taken = (f"{run}-{number}" for number in range(2, 10_000))
        run = next(path for path in map(Path, taken) if not path.exists())
    run.mkdir(parents=True, exist_ok=True)
    return run


@contextmanager
def lock_run(run: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of a folder until the last process of this one has ended, however it ends.

    The system drops a lock with the process that holds it, so none is ever stale. The first rank looks
    whether it is alone; then every rank holds a share.
    """
    file = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o644)

    def look() -> None:
        _lock(file, run, fcntl.LOCK_EX)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {os.uname().nodename}".encode())
        _lock(file, run, fcntl.LOCK_SH)  # before the others ask for their share

    try:
        ranks.from_first(look)
        _lock(file, run, fcntl.LOCK_SH)
        ranks.barrier()
        yield
    finally:
        os.close(file)


def _lock(file: int, run: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = (run / LOCK).read_text("utf-8") or "another process"
        sentence = f"{run} is in use by {holder}: wait until it has ended, or choose another --out"
        raise UsageError(sentence) from None
    except OSError:
        pass  # a file system without locks: training matters more


def trim_metrics(run: Path, steps: int, *, aside: str = "") -> None:
    """Keep the lines of the steps before `steps`: those after them are written again, and none stands twice.

    `aside` names a file of the run folder for what is taken out.
    """
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    parts = {aside: [line for line in lines if _step_of(line) >= steps],
             path.name: [line for line in lines if _step_of(line) < steps]}  # fmt: skip
    for name in [name for name in parts if name and lines]:
        temporary = run / f".{name}.tmp"
        temporary.write_text("".join(line + "\n" for line in parts[name]), "utf-8")
        os.replace(temporary, run / name)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")  # a line that a kill cut short
