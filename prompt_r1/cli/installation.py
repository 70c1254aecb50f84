"""The start of a program, before its imports. Imports only the standard library, of any version."""

import signal
import sys
from importlib.util import find_spec

OLDEST = (3, 11)
PACKAGES = ("yaml", "httpx", "torch", "transformers")


def check_installation() -> None:
    """Exit with one line on Windows, and if this Python is too old, lacks a package or removes docstrings.

    Otherwise let Ctrl-C end the imports that follow.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    repair = "activate the virtual environment, or pip install -r requirements.txt into a new one"
    if sys.platform == "win32":  # no locks of files (fcntl), no SIGUSR1
        problem, repair = "Windows is not supported", "run it in its Linux subsystem (WSL)"
    elif sys.version_info < OLDEST:
        problem = f"this is Python {sys.version.split()[0]}, and 3.11 or newer is needed"
    elif missing:
        problem = f"the package {missing[0]} is not installed"
    elif sys.flags.optimize > 1:
        problem = "this Python removes docstrings, which transformers reads"
        repair = "unset PYTHONOPTIMIZE, or omit -OO"
    else:
        let_ctrl_c_end_imports()
        return
    name = "prompt_r1" if sys.argv[0] == "-m" else sys.argv[0]
    print(f"{name}: {problem}; {repair}", file=sys.stderr)
    sys.exit(2)


def let_ctrl_c_end_imports() -> None:
    """End the process silently: a KeyboardInterrupt would be a traceback of the modules that are imported.

    A shell ignores the signal for what it starts in the background; this stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
