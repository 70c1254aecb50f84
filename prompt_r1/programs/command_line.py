"""The programs' command line: error messages, exit codes, and the parser of their flags."""

import argparse
import errno
import gc
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from prompt_r1.errors import FatalEnvError, Interrupted, Resumable, UsageError, first_line, is_out_of_memory
from prompt_r1.programs.terminal import SHORTEST_SECRET, prepare_standard_streams, printable, scrub

Settings = TypeVar("Settings")  # of a program: its config, or its arguments
CONSOLE_COMMAND = "prompt-r1"
# What `prompt-r1 NAME` runs.
SCRIPTS = {"train": "train.py", "ask": "infer.py", "evaluate": "evaluate.py", "data": "-m prompt_r1.data"}
LONGEST_SENTENCE = 2000  # characters of an error message
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # often without a path
# Environment variables that hold a secret, such as OPENAI_API_KEY, HF_TOKEN and WANDB_API_KEY.
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
MORE_MEMORY = (
    "in training, give a smaller --tokens-per-batch, --parallel fsdp --offload, or more GPUs, and resume "
    "from the last checkpoint; otherwise start fewer processes, take a smaller agent or --device cpu"
)


def run_program(main: Callable[[Settings], None], settings: Settings, *, then: str = "") -> NoReturn:
    """Run `main` with the settings of a program, and exit. `then`: what the same command does after a stop.

    Exit codes: 0 done, 1 a bug of ours, 2 wrong usage or out of memory, 75 stopped but resumable, 130 Ctrl-C.
    Every error is printed as one sentence on stderr; only a bug is a traceback, without keys.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `read_settings` leaves it during the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if main.__module__ == "__main__":  # a program of its own, not a call inside another process
        gc.freeze()  # full collections then skip what was imported, a quarter of a second each time
    with _errors_explained(then and f"; the same command {then}"):
        main(settings)
        sys.stdout.flush()
    sys.exit(0)


@contextmanager
def _errors_explained(then: str = "") -> Iterator[None]:
    """Exit with the code and the sentence of an error, which `then` ends, or with the traceback of a bug."""
    prepare_standard_streams()
    try:
        yield
    except (UsageError, FatalEnvError) as error:
        _exit(2, error)
    except Resumable as error:
        _exit(130 if isinstance(error, Interrupted) else 75, error)
    except KeyboardInterrupt:
        _exit(130, f"interrupted{then}")
    except BrokenPipeError:
        _exit(75, f"nobody reads the output any more{then}")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            _exit(75, f"{error}: free some space or check the disk{then}")
        if isinstance(error, OSError) and error.errno == errno.ENOENT and not error.filename:  # of getcwd
            _exit(2, "the current folder has been deleted: change to one that exists")
        if isinstance(error, OSError) and error.filename:
            path = error.filename2 or error.filename
            _exit(2, f"{path}: {error.strerror}; check the path and its permissions")
        if is_out_of_memory(error):
            _exit(2, f"{first_line(error)}: {MORE_MEMORY}")
        print(printable(without_secrets("".join(traceback.format_exception(error)))), file=sys.stderr)
        _exit(1, "this is a bug: please report it with the traceback above")


def without_secrets(text: str) -> str:
    """The text without the values of environment variables that hold a secret."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value.strip()) >= SHORTEST_SECRET:
            text = scrub(text, value.strip())
    return text


def read_settings(read: Callable[[list[str]], Settings]) -> Settings:
    """The settings that `read` makes of this process's arguments; --help and every error end the process.

    A program calls it before its imports of torch and transformers, which take seconds, and passes the result
    to `run_program`. Errors are explained as there.
    """
    with _errors_explained():
        Path.cwd()  # raises if it has been deleted
        settings = read(sys.argv[1:])
    # Libraries catch KeyboardInterrupt while they are imported, so Ctrl-C ends the process at once until
    # `run_program`. A shell starts its background processes with SIGINT ignored, which stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.stderr.isatty():  # in a log it would mean nothing
        print("Loading …", file=sys.stderr, flush=True)
    return settings


def program_name() -> str:
    """How this program was called: `prompt-r1 NAME`, `train.py` or `python -m prompt_r1.NAME`."""
    path, package = Path(sys.argv[0]), Path(__file__).parents[1]
    if not path.is_relative_to(package):
        return path.name
    module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
    return f"python -m {module.removesuffix('.__main__')}"


def command(program: str, *arguments: object) -> str:
    """A command to type next, as this process was started: one of SCRIPTS with its arguments, quoted."""
    installed = (Path(__file__).parents[1] / "scripts").is_dir()  # its user has no files to name
    by_name = installed or sys.argv[0].startswith(f"{CONSOLE_COMMAND} ")
    start = [CONSOLE_COMMAND, program] if by_name else ["python", *SCRIPTS[program].split()]
    return shlex.join([*start, *map(str, arguments)])


def teaching_command(agent: str) -> str:
    """The command, as a shell reads it, that teaches an agent the format of the game."""
    return shlex.join(["python", "-m", "prompt_r1.training.warm_start", "--agent", agent, "--games", "mini"])


def _exit(code: int, reason: object) -> NoReturn:
    sentence = printable(f"{program_name()}: {reason}").replace("\n", "\\n")  # of a file's name
    if len(sentence) > LONGEST_SENTENCE:  # it repeats a value of the command line or of a file
        sentence = f"{sentence[: LONGEST_SENTENCE // 2]} … {sentence[-LONGEST_SENTENCE // 2 :]}"
    print(sentence, file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError:  # Python flushes it again at its end, and would exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if os.environ.get("WORLD_SIZE", "") not in ("", "1"):
        # At once: the end of an interpreter waits for its threads, and for NCCL, which may wait for ranks
        # that do not know yet that this one leaves.
        os._exit(code)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """Explains a wrong command line in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; `{self.prog} --help` lists the flags")
