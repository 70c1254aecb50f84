"""What torchrun or Slurm tells each process in environment variables, and the names of devices."""

import os
import re

from prompt_r1.errors import UsageError


def is_first_rank() -> bool:
    """Whether this process is the first rank, or the only process."""
    return launcher_number("RANK", default=0) == 0


def has_other_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return launcher_number("WORLD_SIZE", default=1) > 1


def launcher_number(name: str, *, default: int) -> int:
    """A number that the launcher tells this process in an environment variable."""
    return int(os.environ.get(name) or default)


def check_device(name: str) -> None:
    """Raise UsageError if no device has this name, or if several ranks of a machine would share the GPU.

    Only torch knows whether there is a GPU.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"--device {name}: no such device; choose auto, cpu or cuda")
    if ":" in name and launcher_number("LOCAL_WORLD_SIZE", default=1) > 1:
        raise UsageError(f"--device {name}: all ranks would take this GPU; with cuda, each takes its own")
