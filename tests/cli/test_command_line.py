"""How an entry point ends: its exit code, and one sentence on stderr that is safe to print."""

import errno

import pytest
import torch

from prompt_r1.cli.command_line import run
from prompt_r1.errors import FatalEnvError, Resumable, UsageError

HOSTILE = "reply \x1b[2J\x1b]0;owned\a \u202eabc\r\x9b"
SHOWN = r"reply \x1b[2J\x1b]0;owned\x07 \u202eabc\x0d\x9b"


def ended(error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a program that ends with this error, or with none."""

    def main(arguments: list[str]) -> None:
        assert arguments == ["--seed", "1"]
        if error is not None:
            raise error

    monkeypatch.setattr("sys.argv", ["/somewhere/train.py", "--seed", "1"])
    with pytest.raises(SystemExit) as left:
        run(main)
    return left.value.code


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UsageError("no such agent"), 2, "train.py: no such agent\n"),
        (FatalEnvError("HTTP 401"), 2, "train.py: HTTP 401\n"),
        (Resumable("the budget is used up"), 75, "train.py: the budget is used up\n"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            75,
            "train.py: [Errno 28] No space left on device: make room; the same command goes on from the last "
            "checkpoint\n",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            75,
            f"train.py: [Errno {errno.EDQUOT}] Disk quota exceeded: make room; the same command goes on from "
            "the last checkpoint\n",
        ),
        (
            KeyboardInterrupt(),
            130,
            "train.py: interrupted; the same command goes on from the last checkpoint\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_the_user_can_mend_has_its_exit_code_and_one_sentence(
    error, code, sentence, monkeypatch, capsys
):
    assert ended(error, monkeypatch) == code
    assert capsys.readouterr().err == sentence


def test_out_of_memory_says_what_to_give_less(monkeypatch, capsys):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
    assert ended(error, monkeypatch) == 2
    told = capsys.readouterr().err
    assert told.startswith("train.py: CUDA out of memory: in training give --tokens-per-batch less")
    assert "Tried to allocate" not in told


def test_work_that_is_done_exits_with_0_in_silence(monkeypatch, capsys):
    assert ended(None, monkeypatch) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "Permission denied"), KeyError("mine"), AssertionError("3 != 4")]
)
def test_what_is_our_bug_keeps_its_traceback(error, monkeypatch):
    with pytest.raises(type(error)) as seen:
        ended(error, monkeypatch)
    assert seen.value is error


def test_the_sentence_at_the_end_cannot_move_the_cursor(monkeypatch, capsys):
    assert ended(FatalEnvError(HOSTILE), monkeypatch) == 2
    assert capsys.readouterr().err == f"train.py: {SHOWN}\n"


def test_a_module_is_named_by_its_package(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/somewhere/prompt_r1/report/__main__.py"])

    def main(arguments: list[str]) -> None:
        raise UsageError("no run")

    with pytest.raises(SystemExit):
        run(main)
    assert capsys.readouterr().err == "report: no run\n"
