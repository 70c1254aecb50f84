"""What torchrun or Slurm tells each process that it starts, in environment variables."""

import os

from prompt_r1.errors import UsageError


def launched(name: str, default: int) -> int:
    """A number in a variable of the launcher. Raises UsageError."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} is {text!r}, not a number: unset it")
    return int(text)
