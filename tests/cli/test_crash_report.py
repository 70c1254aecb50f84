"""Errors that nobody foresaw: one line for the user, and a file with the traceback, without keys."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prompt_r1.cli.command_line import run_program
from prompt_r1.cli.crash_report import crash_report_in, scrub_secrets
from prompt_r1.errors import InternalError
from tests.support.paths import ROOT
from tests.support.programs import Ended
from tests.support.providers import KEY


@pytest.fixture
def crash(tmp_path, monkeypatch, capfd):
    """Runs a program that fails with an error, in a folder of its own; the temporary folder is another."""
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("sys.argv", ["/somewhere/train.py", "--env-args", KEY.upper()])
    (tmp_path / "temporary").mkdir()

    def crash(error: Exception, folder: Path | None) -> Ended:
        def main(arguments: list[str]) -> None:
            if folder is None:
                raise error
            with crash_report_in(folder):
                raise error

        with pytest.raises(SystemExit) as left:
            run_program(main)
        return Ended(left.value.code, *capfd.readouterr())

    return crash


@pytest.mark.parametrize("place", ["temporary", "run"])
@pytest.mark.parametrize(
    "error", [OSError(errno.EBADF, "Bad file descriptor"), KeyError("mine"), AssertionError(f"3 != 4\n{KEY}")]
)
def test_a_bug_prints_one_line_and_leaves_its_traceback_in_a_file(crash, tmp_path, error, place):
    """Before, the traceback was printed."""
    (tmp_path / "run").mkdir()
    ended = crash(error, tmp_path / "run" if place == "run" else None)
    assert ended.returncode == 1 and ended.stdout == ""
    assert re.fullmatch(r"train.py: internal error \(\w+Error: .*\): .*please report.*\n", ended.stderr)
    reports = list(tmp_path.glob("*/crash-*.txt"))
    assert [report.parent.name for report in reports] == [place] and str(reports[0]) in ended.stderr
    text = reports[0].read_text("utf-8")
    assert "Traceback (most recent call last)" in text and "torch" in text and "raise error" in text
    assert KEY.lower() not in (text + ended.stderr).lower() and "[key]" in text
    assert reports[0].stat().st_mode & 0o077 == 0


def test_a_traceback_goes_to_the_temporary_folder_when_the_run_folder_is_gone(crash, tmp_path):
    ended = crash(KeyError("mine"), tmp_path / "deleted")
    assert ended.returncode == 1 and len(list((tmp_path / "temporary").glob("crash-*.txt"))) == 1


def test_a_traceback_is_printed_without_keys_when_no_folder_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with monkeypatch.context() as patch, pytest.raises(InternalError) as crashed:
        patch.setattr("tempfile.tempdir", str(tmp_path / "deleted"))
        with crash_report_in(tmp_path / "deleted"):
            raise KeyError(KEY)
    assert "Traceback" in str(crashed.value) and KEY not in str(crashed.value)


@pytest.mark.slow
def test_a_reader_that_closes_the_output_is_no_bug(tmp_path):
    """A bug: `infer.py … | head -1` ended with a traceback of BrokenPipeError."""
    code = "from prompt_r1.cli.command_line import run_program\n"
    code += "run_program(lambda arguments: [print('line') for _ in range(100_000)])"
    ended = subprocess.run(
        f'({sys.executable} -c "{code}"; echo $? >{tmp_path}/code) | head -1',
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "line\n" and (tmp_path / "code").read_text() == "75\n"
    assert "nobody reads the output" in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_value_that_is_too_short_for_a_secret_is_left_in_the_text(monkeypatch):
    """Otherwise TOKEN=1 would remove every 1."""
    monkeypatch.setenv("MY_TOKEN", "abcdefghijk")
    monkeypatch.setenv("MY_KEY", "abcdefghijkl")
    assert scrub_secrets("abcdefghijk") == "abcdefghijk"
    assert "abcdefghijkl" not in scrub_secrets("the key abcdefghijkl")
