"""The programs' command line: the parser of their flags, exit codes, and one sentence for each error."""

import argparse
import errno
import gc
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TypeVar

from prompt_r1.errors import Resumable, SignalBeforeTraining, UsageError, first_line, is_out_of_memory
from prompt_r1.programs.launcher import has_other_ranks
from prompt_r1.programs.text import printable, printable_line, without_keys

Settings = TypeVar("Settings")  # what `main` takes: the config of a program, or its arguments
PACKAGE = Path(__file__).parents[1]
# A disk is full, broken or read-only, or a network file system is gone. Such errors often name no path.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)
MORE_MEMORY = (
    "in training, give a smaller --tokens-per-batch, --parallel fsdp --offload, or more GPUs, and resume "
    "from the last checkpoint; otherwise start fewer processes, take a smaller agent or --device cpu"
)


def read_settings(read: Callable[[list[str]], Settings]) -> Settings:
    """The settings that `read` makes of this process's arguments; --help and every error end the process."""
    with errors_explained():
        return read(sys.argv[1:])


def begin_imports() -> None:
    """Prepare this process for imports that take seconds: torch and transformers.

    Until `run_program` is called, Ctrl-C kills the process, because libraries that are being imported catch
    KeyboardInterrupt.
    """
    # Any other handler stays. For example, a shell lets its background processes ignore SIGINT.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The imports make many objects that live until the end. The garbage collector would visit all of them
    # several times, which takes more than half a second.
    gc.disable()
    if sys.stderr.isatty():  # In a log file the line would be noise.
        print("Loading …", file=sys.stderr, flush=True)


def end_imports() -> None:
    """End what `begin_imports` has begun, if it was called."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # From now on, the collector skips all objects that exist already, also in forks.
    gc.enable()


def run_program(main: Callable[[Settings], None], settings: Settings, *, then: str = "") -> NoReturn:
    """Run `main`, and exit. `then` says what the same command does after a stop: "resumes from …".

    `settings` is what `main` takes: the result of `read_settings`, or the list of arguments. A program passes
    its arguments if it imports torch later or not at all. Then `main` reads the settings itself.

    Exit codes: 0 done, 1 a bug of ours, 2 wrong usage or out of memory, 3 no answer (infer.py), 75 stopped
    but resumable, 130 Ctrl-C. Every error is printed as one sentence on stderr; only a bug is a traceback,
    without keys.
    """
    end_imports()
    with errors_explained(then):
        main(settings)
        sys.stdout.flush()
    sys.exit(0)


@contextmanager
def errors_explained(then: str = "") -> Iterator[None]:
    """Exit with the code and the sentence of an error that is raised inside; a bug shows its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # Letters that its encoding lacks are escaped.
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        code, sentence = explain(error, then=then)
        if code == 1:
            shown = "".join(traceback.format_exception(error))
            print(printable(without_keys(shown)), file=sys.stderr)
        exit_with(code, sentence)


def explain(error: BaseException, *, then: str = "") -> tuple[int, str]:
    """The exit code of an error, and its sentence. `then` says what the same command does after a stop."""
    after_a_stop = f"; the same command {then}" if then else ""
    match error:
        case UsageError() | Resumable() | SignalBeforeTraining():
            return error.exit_code, str(error)
        case KeyboardInterrupt():
            return 130, f"interrupted{after_a_stop}"
        case BrokenPipeError():
            return 75, f"nobody reads the output any more{after_a_stop}"
        case OSError() if error.errno in DISK_ERRORS:
            return 75, f"{error}: free some space or check the disk{after_a_stop}"
        case OSError() if error.filename:
            return 2, f"{error.filename}: {error.strerror}; check the path and its permissions"
    if is_out_of_memory(error):
        return 2, f"{first_line(error)}: {MORE_MEMORY}"
    return 1, "this is a bug: please report it with the traceback above"


def exit_with(code: int, reason: str) -> NoReturn:
    """Print the name of the program and why it ends, on one line of stderr, and exit."""
    with suppress(OSError):  # The terminal may have been closed.
        print(printable_line(f"{program_name()}: {reason}"), file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError:  # Otherwise Python would flush stdout again, and change the exit code.
        discard_stdout()
    if has_other_ranks():
        # The end of the interpreter would wait for threads and for NCCL, which may wait for ranks that do not
        # know yet that this rank leaves.
        os._exit(code)
    sys.exit(code)


def discard_stdout() -> None:
    """Send stdout to the null device: what is printed later, and what is still in its buffer."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, sys.stdout.fileno())
    os.close(null_device)


def program_name() -> str:
    """How this program was started: `train.py` or `python -m prompt_r1.NAME`."""
    path = Path(sys.argv[0])
    if not path.is_relative_to(PACKAGE):
        return path.name
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return f"python -m {module.removesuffix('.__main__')}"


def command(program: str, *arguments: object) -> str:
    """A command to type next, quoted for a shell. A program is `train.py` or `-m prompt_r1.data`."""
    return shlex.join(["python", *program.split(), *map(str, arguments)])


class Parser(argparse.ArgumentParser):
    """Explains a wrong command line in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; `{self.prog} --help` lists the flags")
