"""Exit codes, error messages and help of the entry points, and the ranges of their flags."""

import errno
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from prompt_r1.errors import FatalEnvError, Interrupted, Resumable, UsageError, first_line
from prompt_r1.programs.command_line import begin_imports, command, read_settings, run_program
from prompt_r1.programs.installation import check_installation
from tests.support.paths import ROOT
from tests.support.providers import KEY

HOSTILE = "reply \x1b[2J\x1b]0;owned\a \u202eabc\r\x9b"
THEN = "resumes from the last checkpoint"
SHOWN = r"reply \x1b[2J\x1b]0;owned\x07 \u202eabc\r\x9b"


def exit_code(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch, *, reading: bool = False, then: str = ""
) -> object:
    """The exit code of a program that raises this error in `main` or while it reads its settings."""

    def main(arguments: list[str]) -> None:
        assert arguments == ["--seed", "1"]
        if error is not None:
            raise error

    monkeypatch.setattr("sys.argv", ["/somewhere/train.py", "--seed", "1"])
    monkeypatch.setenv("WORLD_SIZE", "")  # an empty variable of a launcher was a traceback
    with pytest.raises(SystemExit) as left:
        if reading:
            read_settings(main)
        else:
            run_program(main, sys.argv[1:], then=then)
    return left.value.code


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (OSError(errno.ENOSPC, "Full"), 75, "train.py: [Errno 28] Full: free some space or check the disk\n"),
        # Bugs: these were "this is a bug", because the error of os.write names no path.
        (OSError(errno.EFBIG, "Big"), 75, "train.py: [Errno 27] Big: free some space or check the disk\n"),
        (
            OSError(errno.ESTALE, "Gone"),
            75,
            "train.py: [Errno 116] Gone: free some space or check the disk\n",
        ),
        (
            OSError(errno.EROFS, "Read-only file system"),
            75,
            "train.py: [Errno 30] Read-only file system: free some space or check the disk\n",
        ),
        (UsageError("no such agent"), 2, "train.py: no such agent\n"),
        (FatalEnvError("HTTP 401"), 2, "train.py: HTTP 401\n"),
        (Resumable("the budget is used up"), 75, "train.py: the budget is used up\n"),
        (Interrupted("SIGINT was received"), 130, "train.py: SIGINT was received\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/root/x"),
            2,
            "train.py: /root/x: Permission denied; check the path and its permissions\n",
        ),
        (
            OSError(errno.ENOSPC, "Full", "x"),
            75,
            f"train.py: [Errno 28] Full: 'x': free some space or check the disk; the same command {THEN}\n",
        ),
        (KeyboardInterrupt(), 130, f"train.py: interrupted; the same command {THEN}\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_that_the_user_can_fix_has_an_exit_code_and_one_sentence(
    error, code, sentence, monkeypatch, capsys
):
    """Also while the settings are read, when there is no checkpoint to resume from yet."""
    assert exit_code(error, monkeypatch, then=THEN if THEN in sentence else "") == code
    assert capsys.readouterr().err == sentence
    assert exit_code(error, monkeypatch, reading=True) == code
    assert capsys.readouterr().err == sentence.replace(f"; the same command {THEN}", "")


@pytest.mark.parametrize(("during", "code"), [("imports", -signal.SIGINT), ("main", 130)])
def test_ctrl_c_ends_a_program_also_during_its_imports_without_a_traceback(during, code):
    """A bug: numpy, while it was imported, caught the exception, and the training that was stopped began."""
    program = f"""
import os, signal, time
from prompt_r1.programs.command_line import begin_imports, read_settings, run_program

def stop(place):
    try:
        if place == "{during}":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
    except KeyboardInterrupt:
        if place == "main":
            raise

settings = read_settings(lambda arguments: None)
begin_imports()
stop("imports")
run_program(lambda _: stop("main"), settings)
"""
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell may start pytest without it
    start = [sys.executable, "-c", program]
    ended = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, preexec_fn=default)
    assert ended.returncode == code
    assert ended.stderr == ("" if during == "imports" else "-c: interrupted\n")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None], ids=["ignored", "own"])
def test_a_handler_of_ctrl_c_that_is_not_pythons_own_stays(handler, monkeypatch):
    """A shell lets its background processes ignore Ctrl-C, which is meant for the one in the foreground."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        begin_imports()
        assert signal.getsignal(signal.SIGINT) is handler
        assert exit_code(None, monkeypatch) == 0
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
        MemoryError(),
        torch.OutOfMemoryError("while a step was recorded: it failed"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_may_also_run_out_beside_the_allocator_of_gpus(monkeypatch, capsys, error):
    assert exit_code(error, monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"train.py: {first_line(error)}: in training, give")


def test_a_rank_that_fails_is_gone_at_once():
    """Whatever its threads still do: the other ranks notice it when its connections are closed."""
    program = """
import sys, threading, time
from prompt_r1.programs.command_line import run_program
from prompt_r1.errors import Resumable

def main(_):
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise Resumable("stopped")

run_program(main, [])
"""
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 75 and "stopped" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_at_the_end_is_said():
    program = (
        "from prompt_r1.programs.command_line import run_program\nrun_program(lambda _: print('a table'), [])"
    )
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-c", program]
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(
            line, env=buffered, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=50
        )
    assert done.returncode == 75 and "No space left on device: free some space" in done.stderr


def test_a_command_to_type_next_is_quoted_for_a_shell():
    shown = "python -m prompt_r1.data mix --in 'my runs/a b'"
    assert command("-m prompt_r1.data", "mix", "--in", Path("my runs/a b")) == shown


def test_an_error_message_cannot_move_the_cursor(monkeypatch, capsys):
    assert exit_code(FatalEnvError(HOSTILE), monkeypatch) == 2
    assert capsys.readouterr().err == f"train.py: {SHOWN}\n"


def test_a_bug_exits_with_1(monkeypatch, capsys):
    """Only a bug shows a traceback, without keys; a short value of TOKEN=1 would remove every 1."""
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    monkeypatch.setenv("WANDB_API_KEY", KEY[::-1])
    monkeypatch.setenv("MY_TOKEN", "bug")
    assert exit_code(KeyError(f"a bug with {KEY.upper()} and {KEY[::-1]}"), monkeypatch) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and "with [key] and [key]" in shown and KEY not in shown.lower()
    assert shown.splitlines()[-1].startswith("train.py: this is a bug: please report it")


def test_windows_is_named_before_an_import_fails(monkeypatch, capsys):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit) as left:
        check_installation()
    assert left.value.code == 2 and "Windows is not supported" in capsys.readouterr().err
