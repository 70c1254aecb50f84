"""Where infer.py takes its questions from."""

import io

import pytest

from prompt_r1.cli.question_input import given_questions


class Terminal(io.StringIO):
    """Standard input of a user at a keyboard."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdin", "question", "asked"),
    [
        (Terminal("not read\n"), "", []),  # the user types the questions
        (io.StringIO("Who?\n\n When? \n"), "", ["Who?", "When?"]),
        (io.StringIO("not read\n"), " Who? ", ["Who?"]),
    ],
)
def test_without_a_question_the_lines_of_standard_input_are_asked(stdin, question, asked, monkeypatch):
    monkeypatch.setattr("sys.stdin", stdin)
    assert given_questions(question) == asked
