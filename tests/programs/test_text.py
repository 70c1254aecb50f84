"""What reaches a terminal: characters that could act on it are escaped."""

import io
import re
import sys
import unicodedata
from unittest.mock import Mock

import pytest

from prompt_r1.programs.command_line import errors_explained
from prompt_r1.programs.progress import progress_bar
from prompt_r1.programs.text import printable, printable_line, without_keys

# Such as the CSI of eight bits, right to left, and a line separator.
ACTING = "\x1b\0\x7f\x9b\xad\u0600\u200b\u202e\u2028\u2029\ud800\ue000\uffff\U0001d173\U000f0000"


@pytest.mark.parametrize("letter", ACTING)
def test_a_letter_that_could_act_on_the_terminal_is_escaped_as_python_writes_it(letter):
    shown = letter.encode("unicode_escape").decode()
    assert printable(f"a{letter}b") == f"a{shown}b" == printable_line(f"a{letter}b")
    assert printable("a\rb") == "a\\rb" == printable_line("a\rb")


def test_visible_text_of_any_script_is_left_as_it_is():
    text = "plain ~ text,\ttab\nÄöü € 漢字 العربية 👍"
    assert printable(text) == text and all(unicodedata.category(c)[0] != "C" for c in text if c not in "\t\n")
    assert printable("two\r\nlines") == "two\nlines"
    assert printable_line("two\r\nlines\tand a tab") == "two lines and a tab"


def test_a_key_is_replaced_wherever_it_stands_and_in_any_case(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " sk-abc+01234\n")
    monkeypatch.setenv("OTHER_API_KEY", "placeholder")  # It has eleven characters, so it is no secret.
    assert without_keys("sk-AbC+01234 and SK-abc+01234, twice") == "[key] and [key], twice"
    assert without_keys("no pattern: sk-abcc01234") == "no pattern: sk-abcc01234"
    assert without_keys("a placeholder") == "a placeholder"


def test_output_that_its_encoding_lacks_is_escaped_and_not_an_error(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    with errors_explained():
        narrow.write("é")
        narrow.flush()
    assert narrow.buffer.getvalue() == b"\\xe9"


def test_without_a_terminal_progress_is_a_line_every_ten_seconds_up_to_100_percent(monkeypatch, capsys):
    """A bug: the lines in a log file ended at 80 %."""
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for seconds, expected in [(1, []), (6, [2, 4, 5])]:  # steps that take a second, or six
        for _ in progress_bar(range(5), name="games"):
            now[0] += seconds
        error = capsys.readouterr().err
        assert [line.split("|")[2].split()[0] for line in error.splitlines()] == [f"{n}/5" for n in expected]
        assert "\r" not in error


def test_work_goes_on_when_nobody_reads_its_progress_any_more(monkeypatch):
    """A bug: `python train.py 2>&1 | head -5` ended in the test of the trained agent."""
    unread = io.StringIO()
    unread.write = Mock(side_effect=BrokenPipeError)
    monkeypatch.setattr(sys, "stderr", unread)
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for _ in progress_bar(range(3), name="games"):
        now[0] += 20
    assert unread.write.called


def test_at_a_terminal_progress_is_shown_from_the_start_to_100_percent_unless_it_is_hidden(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for shown in (True, False):
        with progress_bar(name="test", unit="game", total=3, shown=shown) as bar:
            for _ in range(3):
                bar.update()
        states = capsys.readouterr().err.split("\r")
        if shown:
            assert re.fullmatch(r"test: 100%\|.*\| 3/3 \[.*game/s\]\n", states[-1])
            assert re.match(r"test: +0%\|.*\| 0/3 ", states[1]), "it is shown from the beginning"
        else:
            assert states == [""]
