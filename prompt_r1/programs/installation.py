"""What a program checks before its imports: the Python that runs it, and the packages that are installed.

This file runs in old Pythons, and imports only the standard library.
"""

import sys
from importlib.util import find_spec

OLDEST = (3, 11)
PACKAGES = ("yaml", "httpx", "torch", "transformers")


def check_installation() -> None:
    """Exit with one line on Windows, and if this Python is too old or lacks a package."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    repair = "activate the virtual environment, or pip install -r requirements.txt into a new one"
    if sys.platform == "win32":  # Windows has no locks of files (fcntl), and no SIGUSR1.
        problem, repair = "Windows is not supported", "run it in its Linux subsystem (WSL)"
    elif sys.version_info < OLDEST:
        problem = f"this is Python {sys.version.split()[0]}, and 3.11 or newer is needed"
    elif missing:
        problem = f"the package {missing[0]} is not installed"
    else:
        return
    print(f"{problem}; {repair}", file=sys.stderr)
    sys.exit(2)
