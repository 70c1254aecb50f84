"""Where infer.py takes its questions from."""

import io

import pytest

from prompt_r1.cli.question_input import given_questions
from prompt_r1.errors import UsageError


class Terminal(io.StringIO):
    """Standard input of a user at a keyboard."""

    def isatty(self) -> bool:
        return True


def test_without_flags_a_user_at_a_terminal_types_the_questions(monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("not read\n"))
    assert given_questions(question="", file="") == []


@pytest.mark.parametrize("flags", [{"question": "-", "file": ""}, {"question": "", "file": "-"}])
@pytest.mark.parametrize("stdin", [io.StringIO, Terminal])
def test_a_dash_reads_each_line_of_standard_input(flags, stdin, monkeypatch):
    monkeypatch.setattr("sys.stdin", stdin("Who?\n\n When? \n"))
    assert given_questions(**flags) == ["Who?", "When?"]


def test_lines_that_are_piped_in_need_no_flag(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n"))
    assert given_questions(question="", file="") == ["Who?"]
    with pytest.raises(UsageError, match="nothing to ask"):
        given_questions(question="", file="")
