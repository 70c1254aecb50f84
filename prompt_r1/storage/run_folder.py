"""A run's folder: choose, lock, trim on resume."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prompt_r1.distributed import Ranks
from prompt_r1.errors import UsageError
from prompt_r1.foreign import is_finite_number, json_object, make_folder, replace_file
from prompt_r1.storage.checkpoint import checkpoints_of

LOCK = ".lock"
TRACKERS = ("wandb",)  # folders that a tracker fills, with links of its own
# The names that are written under a temporary name first.
REPLACED = r"agent|metrics\.jsonl"


def open_run(out: str, resume: str, name: str) -> Path:
    """Choose and make the run folder by --out ("": runs/NAME) and --resume.

    auto resumes the run in --out, a folder resumes the run there, and never starts a new run in a free
    folder. Raises UsageError rather than write into a folder that holds another run or other files.
    """
    run = Path(out or f"runs/{name}")
    if resume not in ("auto", "never"):
        run = Path(resume)
        if not checkpoints_of(run):
            raise UsageError(f"--resume {run}: there is no checkpoint in it")
    elif resume == "never" and (run / "config.yaml").exists():
        if out:
            raise UsageError(f"--resume never: {run} holds a run already; choose another --out or delete it")
        candidates = (Path(f"{run}-{number}") for number in range(2, 10_000))
        run = next(path for path in candidates if not path.exists())
    make_folder(run, _holds_run, "a run", skip=TRACKERS)
    return run


def _holds_run(folder: Path) -> bool:
    """Whether a run has written into the folder; its copy may lack the hidden file."""
    return (folder / LOCK).exists() or bool(checkpoints_of(folder))


@contextmanager
def lock_run(run: Path, ranks: Ranks) -> Iterator[None]:
    """Lock a run folder against other runs until the last process of this run has ended.

    The operating system releases the lock when a process ends in any way, so a lock is never stale. The first
    rank takes an exclusive lock and turns it into a shared one, which every rank then takes too. Called by
    every rank. Raises UsageError if another run holds the folder.
    """
    try:
        file = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UsageError(f"{run / LOCK}: {error.strerror}; give an --out that can be written") from None

    def claim() -> None:
        _lock(file, run, fcntl.LOCK_EX)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {os.uname().nodename}".encode())
        _lock(file, run, fcntl.LOCK_SH)  # before the other ranks take theirs

    try:
        ranks.from_first(claim)
        _lock(file, run, fcntl.LOCK_SH)
        ranks.barrier()
        try:
            yield
        finally:
            if ranks.first:
                _remove_unused(run)
    finally:
        os.close(file)


def _remove_unused(run: Path) -> None:
    """Remove the folder of a run that was refused before it began, unless it holds a paid call."""
    with suppress(OSError):
        files = {path.name for path in run.rglob("*") if path.is_file() and path.stat().st_size}
        if files <= {LOCK} and {path.name for path in run.iterdir()} <= {*files, "journal"}:
            shutil.rmtree(run)
            if run.parent == Path("runs"):
                run.parent.rmdir()  # only if it is empty


def _lock(file: int, run: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = (run / LOCK).read_text("utf-8") or "another process"
        raise UsageError(
            f"{run} is in use by {holder}: wait until it has ended, or choose another --out"
        ) from None
    except OSError:
        pass  # a file system without locks: train without one


def trim_run(run: Path, *, trained: int, logged: int) -> None:
    """Remove what a resumed run writes again: games after step `trained`, metric lines after step `logged`.

    Another number of ranks would not overwrite all files of games. The test is played again too.
    """
    kept_up_to = {"step": trained, "validation": logged, "test": -1}
    for path in (run / "trajectories").glob("*.jsonl"):
        match = re.match(r"(step|validation|test)-(\d*)", path.name)
        if match and int(match[2] or 0) > kept_up_to[match[1]]:
            path.unlink()
    path = run / "metrics.jsonl"
    if path.exists():
        lines = path.read_text("utf-8", errors="replace").splitlines()
        kept = [f"{line}\n" for line in lines if _step_of(line) <= logged]
        replace_file(path, "".join(kept).encode())


def _step_of(line: str) -> float:
    step = json_object(line).get("step")
    return step if is_finite_number(step) else float("inf")  # cut short by a kill, or no metric line
