"""The folder of a run: make, check and lock it. Imports no torch, so that mistakes are named at once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from prompt_r1.errors import UsageError
from prompt_r1.programs.files import lock, make_folder
from prompt_r1.programs.folders import find_damage, remove_leftovers
from prompt_r1.programs.reading import json_object
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.settings.fields import experiment_values, read_mapping

LOCK = ".lock"
TEST_FILE = "test.md"  # the table of the test by dataset
# The version of checkpoints. It rises with every change of state.json, of tensors' names or of settings.
FORMAT = 9


def open_run(out: str) -> Path:
    """Make the run folder --out if necessary. Raises UsageError if it holds other files than a run's."""
    run = Path(out)
    make_folder(run, _holds_a_run, "a run")
    # A run saves a checkpoint before it exports an agent.
    if (run / "agent").exists() and not checkpoints_of(run):
        raise UsageError(
            f"{run}: its checkpoints are gone or unreadable, and a new run would replace its agent: put them "
            "back, or give another --out"
        )
    return run


def _holds_a_run(folder: Path) -> bool:
    """Whether a run was started in a folder. A copy by `cp run/*` has the checkpoints, but no lock file."""
    return (folder / LOCK).exists() or bool(checkpoints_of(folder))


def checkpoints_of(run: Path) -> list[Path]:
    """The checkpoints of a run folder, also damaged ones, the oldest first."""
    folders = (run / "checkpoints").glob("step-*")
    numbered = (folder for folder in folders if folder.name.removeprefix("step-").isdecimal())
    return sorted(numbered, key=step_of)


def checkpoint_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is, if there is one."""
    return run / "checkpoints" / f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def newest_checkpoint(run: Path, *, say: Callable[[str], object]) -> Path | None:
    """Find the newest undamaged checkpoint; None if there is no checkpoint at all.

    Damaged checkpoints are skipped, and `say` gets a line about each. Raises UsageError if all checkpoints
    are damaged, or if the search meets a checkpoint of another version.
    """
    found = checkpoints_of(run)
    for checkpoint in reversed(found):
        check_version(checkpoint)
        damage = find_damage(checkpoint)
        if not damage:
            return checkpoint
        say(f"Skipping {checkpoint}: {damage}")
    if found:
        raise UsageError(
            f"none of the {len(found)} checkpoints in {run}/checkpoints is valid: repair them, or start a "
            "new run with another --out"
        )
    return None


def check_version(checkpoint: Path) -> None:
    """Raise UsageError for a checkpoint that another version of this program wrote."""
    file = checkpoint / "state.json"
    state = json_object(file.read_bytes()) if file.is_file() else {}
    if state and state.get("format") != FORMAT:
        raise UsageError(
            f"{checkpoint} was written by another version: its agent can play, but its training cannot be "
            "resumed; start a new run with another --out"
        )


def check_same_settings(checkpoint: Path, config: AgentConfig) -> None:
    """Raise UsageError for a checkpoint that was made with other settings of the experiment.

    Settings that do not identify a run may differ, such as the number of steps, or the device.
    """
    before = read_mapping(checkpoint / "config.yaml")
    for name, now in experiment_values(config).items():
        if before.get(name) != now:
            raise UsageError(
                f"{checkpoint} was made with {name} = {before.get(name)!r}, not {now!r}: "
                "resume with the same value, or start a new run with another --out"
            )


def claim(file: TextIO, run: Path) -> None:
    """Lock a run folder while its `file` LOCK is open, and remove what a killed run left unfinished.

    The number of this process is written into the file. If the folder is locked, raises UsageError with the
    name of the other process.
    """
    if not lock(file, run / LOCK):
        file.seek(0)
        owner = file.read() or "another process"
        raise UsageError(f"{run} is in use by {owner}: wait until it has ended, or choose another --out")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    remove_leftovers(run)
    remove_leftovers(run / "checkpoints")
