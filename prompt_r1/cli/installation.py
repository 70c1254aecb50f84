"""Refuse a Python that lacks our packages. Imports only the standard library, of any version."""

import sys
from importlib.util import find_spec

OLDEST = (3, 11)
PACKAGES = ("yaml", "httpx", "torch", "transformers")


def check_installation() -> None:
    """Exit with one line if this Python is too old or lacks a package."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if sys.version_info < OLDEST:
        problem = f"this is Python {sys.version.split()[0]}, and 3.11 or newer is needed"
    elif missing:
        problem = f"the package {missing[0]} is not installed"
    else:
        return
    repair = "activate the virtual environment, or pip install -r requirements.txt into a new one"
    name = "prompt_r1" if sys.argv[0] == "-m" else sys.argv[0]
    print(f"{name}: {problem}; {repair}", file=sys.stderr)
    sys.exit(2)
