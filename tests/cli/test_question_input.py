"""Where infer.py takes its questions from."""

import io

import pytest

from prompt_r1.cli.question_input import given_questions


class Terminal(io.StringIO):
    """Standard input of a user at a keyboard."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdin", "question", "file", "asked"),
    [
        (Terminal("not read\n"), "", "", []),  # the user types the questions
        (Terminal("Who?\n\n When? \n"), "-", "", ["Who?", "When?"]),
        (io.StringIO("Who?\n\n When? \n"), "", "-", ["Who?", "When?"]),
        (io.StringIO("Who?\n"), "", "", ["Who?"]),
    ],
)
def test_a_dash_and_a_pipe_stand_for_the_lines_of_standard_input(stdin, question, file, asked, monkeypatch):
    monkeypatch.setattr("sys.stdin", stdin)
    assert given_questions(question=question, file=file) == asked
