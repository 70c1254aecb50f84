"""What torchrun or Slurm tells each process that it starts, in environment variables."""

import os

from prompt_r1.errors import UsageError


def is_first_rank() -> bool:
    """Whether this process is the first rank, or the only process. Raises UsageError."""
    return launcher_number("RANK", default=0) == 0


def launcher_number(name: str, *, default: int) -> int:
    """A number that the launcher tells this process in an environment variable. Raises UsageError."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} is {text!r}, not a number: unset it")
    return int(text)
