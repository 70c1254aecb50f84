"""What a game looks like as text, its cost, its form for programs, and where its question comes from."""

import io
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

import infer
from prompt_r1.chat_template import PieceEncoder, decode
from prompt_r1.errors import UsageError
from prompt_r1.pair.dialogue import DialoguePrinter, DialogueSplitter, Piece
from prompt_r1.programs.tables import markdown_table
from prompt_r1.spending import Spending
from prompt_r1.types import Action, Question, Trajectory, Turn
from tests.support.templates import KINDS, TOKENIZERS, tokenizer_of

GAME = Trajectory(
    Question("q", "d", "Who?", ("Anna",)),
    turns=[Turn("<answer>Anna</answer>", Action(None, None, "Anna", clean=False), reply=None, latency=0.5)],
    stop="answered",
)


def test_two_games_are_written_with_their_labels_in_a_column_of_13():
    written: list[str] = []
    printer = DialoguePrinter(written.append)
    splitter = DialogueSplitter("".join, printer.piece)  # its tokens are texts
    for _ in range(2):
        printer.question("Who?\nReally?")
        splitter.add_token("<interaction_prompt>Who is")
        splitter.add_token(" it?</interaction_prompt>")
        splitter.end_turn()
        splitter.add_reply("  Anna. ")
        splitter.add_token("<answer>An")
        splitter.end_turn()
        printer.note("note", "stopped")
    game = (
        "question     Who?\n             Really?\n\n"
        "agent asks   Who is it?\n"
        "environment  Anna.\n\n"
        "answer       An\n"
        "note         stopped\n"
    )
    assert "".join(written) == f"{game}\n{game}"


def pieces_of(*turn: str, ended: bool) -> list[tuple[str, str]]:
    """The pieces of a turn whose tokens are these texts: tag name, text."""
    shown: list[Piece] = []
    splitter = DialogueSplitter("".join, shown.append)
    for token in turn:
        splitter.add_token(token)
    if ended:
        splitter.end_turn()
    return [(piece.kind, piece.text) for piece in shown]


@pytest.mark.parametrize(("letters", "waits"), [(0, True), (1, True), (19, True), (20, False), (21, False)])
def test_what_may_become_a_tag_waits_while_it_is_shorter_than_the_longest_one(letters, waits):
    """</interaction_prompt> has 21 characters; a bracket and 20 letters are text."""
    half_a_tag = "<" + "a" * letters
    now, rest = ("x", f" {half_a_tag}") if waits else (f"x {half_a_tag}", "")
    assert pieces_of(f"<think>x {half_a_tag}", ended=False) == [("think", now)]
    assert pieces_of(f"<think>x {half_a_tag}", ended=True) == [("think", now)] + [("think", rest)] * waits


def test_half_a_character_waits_for_its_other_bytes_or_the_end_of_the_turn():
    assert pieces_of("<think>x", "\ufffd", ended=False) == [("think", "x")]
    assert pieces_of("<think>x", "\ufffd", ended=True) == [("think", "x"), ("think", "\ufffd")]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_have_the_text_of_the_turn_with_every_tokenizer(name):
    """Some drop the blank before the first word that they decode, and a character may take four tokens."""
    tokenizer = tokenizer_of(KINDS["Gemma"], name)
    text = "Who  is <b>Zoë</b> 漢字? 🙂 <| \n\n é"
    tokens = PieceEncoder(tokenizer).trusted(f"<think> {text} </think><answer>{text}</answer>")
    shown: list[Piece] = []
    splitter = DialogueSplitter(partial(decode, tokenizer), shown.append)
    for token in tokens:
        splitter.add_token(token)
    splitter.end_turn()
    for kind in ("think", "answer"):
        assert "".join(piece.text for piece in shown if piece.kind == kind) == text
    assert len(shown) > 10


def test_each_token_of_a_turn_is_decoded_a_few_times_however_long_the_turn_is():
    """The whole turn was decoded again with each token: a turn of 1,000 tokens decoded half a million."""
    decoded = 0

    def count(tokens: list[str]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return "".join(tokens)

    splitter = DialogueSplitter(count, str)
    for _ in range(1000):
        splitter.add_token(" word")
    splitter.end_turn()
    assert decoded < 4 * 1000


def test_spending_is_one_line_without_what_is_zero():
    assert str(Spending(1)) == "1 call" and str(Spending(0, 0, 5)) == "0 calls, 0 + 5 tokens"
    line = "2 calls, 1,200 + 30 tokens, $0.5000 ($0.2500 of it estimated, for lost requests)"
    assert str(Spending(2, 1200, 30, 0.5, lost_usd=0.25)) == line


def test_a_call_that_costs_a_hundredth_of_a_cent_is_not_shown_as_free():
    """The log of a server said "1 call, 37 + 6 tokens, $0.0000" of calls that were billed."""
    assert str(Spending(1, 37, 6, 0.000031)) == "1 call, 37 + 6 tokens, $0.000031"
    assert str(Spending(1, usd=0.0099)) == "1 call, $0.009900"
    assert str(Spending(1, usd=0.01)) == "1 call, $0.0100"


def test_a_finished_game_has_these_fields_for_programs():
    pair = SimpleNamespace(path="a", environment=SimpleNamespace(name="e"))
    finished = replace(GAME, charged=Spending(2, 10, 5, 0.5), seconds=1.5)
    assert infer.game_as_json(finished, pair, priced=True) == {
        **{"question": "Who?", "answer": "Anna", "stop": "answered", "error": ""},
        "turns": [
            {
                "text": "<answer>Anna</answer>",
                "action": {"think": None, "prompt": None, "answer": "Anna", "clean": False},
                "reply": None,
                "latency": 0.5,
            }
        ],
        **{"agent": "a", "environment": "e", "calls": 2, "tokens_in": 10, "tokens_out": 5, "usd": 0.5},
        **{"seconds": 1.5, "lost_usd": 0.0},
    }
    assert infer.game_as_json(finished, pair, priced=False)["usd"] is None
    game = Trajectory(GAME.question, stop="env_error", error="down")
    broken = infer.game_as_json(game, pair, priced=False)
    assert (broken["stop"], broken["error"]) == ("env_error", "down")


def test_typed_questions_end_at_an_empty_line_or_at_the_end_of_the_input(monkeypatch, capsys):
    """The prompt was the first line of the file of games that `infer.py --json > games.jsonl` writes."""

    def type_in(text: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return list(infer.typed_questions())

    assert type_in(" Who? \nWhy?\n  \nnever\n") == ["Who?", "Why?"]
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "\nask (an empty line ends):\n" * 3
    assert type_in("Who?\n") == ["Who?"]
    assert capsys.readouterr().out == ""


def test_a_markdown_table_aligns_numbers_to_the_right_and_keeps_pipes_in_their_cells():
    table = markdown_table(["a", "b", "c"], [["x|y", "1", "2\n3"], ["\\|", "", "4"]], left=2)
    assert table.splitlines() == [
        "| a    | b   |   c |",
        "| ---- | --- | --: |",
        "| x\\|y | 1   | 2 3 |",
        "| \\\\\\| |     |   4 |",
    ]
    assert markdown_table(["a", "b"], []).splitlines()[1] == "| --- | --: |"


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
        (io.StringIO("Who\u2028is\x0cit?\n"), "", ["Who\u2028is\x0cit?"]),  # of a web page, of a PDF
    ],
)
def test_without_a_question_the_lines_of_standard_input_are_asked(stdin, question, asked, monkeypatch):
    monkeypatch.setattr("sys.stdin", stdin)
    assert infer.given_questions(question) == asked


@pytest.mark.parametrize(
    ("stdin", "sentence"),
    [
        ("", "nothing to ask"),
        (" \n", "nothing to ask"),
        ('{"question": "Who?"}\n', "standard input holds JSON"),
    ],
)
def test_standard_input_without_a_question_in_words_is_a_usage_error(stdin, sentence, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    with pytest.raises(UsageError, match=sentence):
        infer.given_questions("")
