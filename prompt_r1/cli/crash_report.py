"""The report of a bug: a traceback without keys."""

import errno
import os
import platform
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_r1.errors import EnvError, FatalEnvError, InternalError, Resumable, UsageError, out_of_memory
from prompt_r1.terminal import SHORTEST_SECRET, scrub
from prompt_r1.version import installed_version

FORESEEN = (UsageError, FatalEnvError, EnvError, Resumable, InternalError)
# Errors of a disk, often without a path, and what to do about them.
DISK_ADVICE = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some space", errno.EIO: "check the disk"}
# Environment variables that hold a secret, such as OPENAI_API_KEY, HF_TOKEN and WANDB_API_KEY.
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


@contextmanager
def crash_report_in(folder: Path | None = None) -> Iterator[None]:
    """Turn an unforeseen error of the block into an InternalError, with the traceback in a file of `folder`.

    Without a folder, or where it cannot be written, the file is in the temporary folder.
    """
    try:
        yield
    except FORESEEN:
        raise
    except Exception as error:
        if isinstance(error, OSError) and (
            error.filename or error.errno in DISK_ADVICE or error.errno == errno.EPIPE
        ):
            raise
        if out_of_memory(error):
            raise
        report = _report(error)
        where = (folder and _write(report, folder)) or _write(report, None)
        first_line = scrub_secrets(f"{type(error).__name__}: {error}".splitlines()[0])
        raise InternalError(
            f"internal error ({first_line}): this is a bug; please report it with "
            + (f"the file {where}, which has the traceback" if where else f"this traceback:\n{report}")
        ) from None


def _report(error: BaseException) -> str:
    """Command, versions and traceback, without secrets."""
    lines = [
        shlex.join(sys.argv),
        f"Python {platform.python_version()}, torch {installed_version('torch') or 'not installed'}, "
        f"transformers {installed_version('transformers') or 'not installed'}, {platform.platform()}",
        "",
        "".join(traceback.format_exception(error)),
    ]
    return scrub_secrets("\n".join(lines))


def scrub_secrets(text: str) -> str:
    """The text without the values of environment variables that hold a secret."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value.strip()) >= SHORTEST_SECRET:
            text = scrub(text, value.strip())
    return text


def _write(text: str, folder: Path | None) -> Path | None:
    """Write a new file that only the user can read (None: in the temporary folder); None if it fails."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="crash-", suffix=".txt", dir=folder)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return None
    return Path(name)
