"""A run's folder: choose, check, lock. It is checked before torch is imported."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from prompt_r1.errors import UsageError
from prompt_r1.programs.files import json_object, make_folder
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.settings.fields import identifying_values, read_mapping

LOCK = ".lock"
FORMAT = 4  # of checkpoints: increased with every change of state.json, of the tensors or the settings


def open_run(out: str, resume: str) -> Path:
    """Choose and make the run folder by --out and --resume.

    auto resumes the run in --out, a folder resumes the run there, and never begins a new run. Raises
    UsageError rather than write into a folder that holds another run or other files.
    """
    run = Path(out)
    if resume not in ("auto", "never"):
        run = Path(resume)
        if not checkpoints_of(run):
            raise UsageError(f"--resume {run}: there is no checkpoint in it")
    elif resume == "never" and ((run / "config.yaml").exists() or checkpoints_of(run)):
        raise UsageError(f"--resume never: {run} holds a run already; choose another --out or delete it")
    # A copy of a run may lack the hidden file.
    make_folder(run, lambda run: (run / LOCK).exists() or bool(checkpoints_of(run)), "a run")
    if not os.access(run, os.W_OK):
        raise UsageError(f"--out {run}: Permission denied; give a folder that can be written")
    if (run / "report.html").exists() and not checkpoints_of(run):  # it is written after a checkpoint
        raise UsageError(
            f"{run}: its checkpoints are gone or unreadable, and a new run would replace its agent: put them "
            "back, or give another --out"
        )
    return run


def checkpoints_of(run: Path) -> list[Path]:
    """The checkpoints of a run folder, valid or not, oldest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def check_settings(checkpoint: Path, config: AgentConfig) -> None:
    """Raise UsageError for a checkpoint of another version, or of a run that other settings identify.

    Settings that do not identify a run may differ: it may be resumed with more steps or on another machine.
    """
    if json_object((checkpoint / "state.json").read_text("utf-8")).get("format") != FORMAT:
        raise UsageError(
            f"{checkpoint} was written by another version: its agent can play, but its training cannot be "
            "resumed; start a new run with another --out"
        )
    before = read_mapping(checkpoint / "config.yaml")
    for name, now in identifying_values(config).items():
        now = list(now) if isinstance(now, tuple) else now
        if before.get(name) != now:
            raise UsageError(
                f"{checkpoint} was made with {name} = {before.get(name)!r}, not {now!r}: "
                "resume with the same value, or start a new run with another --out"
            )


def claim(file: TextIO, run: Path) -> None:
    """Lock the open file LOCK of a run folder, until it is closed. Raises UsageError if it is locked.

    The operating system releases the lock when this process ends in any way, so a lock is never stale.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UsageError(
            f"{run} is in use by {file.read() or 'another process'}: wait until it has ended, or choose "
            "another --out"
        ) from None
    except OSError:
        pass  # a file system without locks: train without one
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
