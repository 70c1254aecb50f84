"""Show a game: cut it into pieces while it is played, print the pieces as text, or write the game as JSON."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from prompt_r1.programs.text import printable
from prompt_r1.types import Trajectory

TAG = re.compile("<(/?)(think|interaction_prompt|answer)>")
MAX_TAG = len("</interaction_prompt>")
LABELS = {
    "think": "agent thinks",
    "interaction_prompt": "agent asks",
    "answer": "answer",
    "": "agent writes",
    "reply": "environment",
}
INDENT = 13  # columns: the longest label and a space


@dataclass(frozen=True)
class Piece:
    """The next piece of a dialogue: a part of a block of the agent's turn, or a whole reply."""

    kind: str  # the name of the block's tag, "" for text outside all tags, or "reply"
    text: str
    begins: bool  # whether this is the first piece of its block


def blocks(text: str, *, ended: bool) -> list[tuple[str, str]]:
    """Split a turn into (tag name, content) blocks, in order. Text outside all tags has the name "".

    Until the turn has `ended`, its end may be half a tag or half a character. Such an end is left out, so
    that the content of a block only grows from call to call.
    """
    found = []
    name = ""
    start = 0
    for tag in TAG.finditer(text):
        found.append((name, text[start : tag.start()]))
        is_closing = tag[1] == "/"
        name = "" if is_closing else tag[2]
        start = tag.end()
    last = text[start:]
    if not ended:
        # A character of which only some bytes have been sampled is decoded as U+FFFD.
        last = _without_half_a_tag(last).rstrip("\ufffd")
    found.append((name, last))
    return [(name, content.strip()) for name, content in found if content.strip()]


def _without_half_a_tag(text: str) -> str:
    bracket = text.rfind("<")
    may_become_a_tag = bracket >= 0 and len(text) - bracket < MAX_TAG
    return text[:bracket] if may_become_a_tag else text


class Pieces:
    """Cuts a game into pieces while it is played: the agent's turns token by token, and the replies.

    `decode` returns the text of a turn's tokens. `on_piece` gets each piece.
    """

    def __init__(self, decode: Callable[[list[int]], str], on_piece: Callable[[Piece], object]) -> None:
        self._decode = decode
        self._on_piece = on_piece
        self._tokens: list[int] = []  # the turn so far
        self._shown: list[int] = []  # for each block of the turn: how many characters have been in a piece

    def token(self, token: int) -> None:
        """Add the next token of the agent's turn."""
        self._tokens.append(token)
        self._cut(ended=False)

    def end_turn(self) -> None:
        """End the agent's turn. What might still have become a tag is text now."""
        self._cut(ended=True)
        self._tokens.clear()
        self._shown.clear()

    def reply(self, text: str) -> None:
        """End the agent's turn, and add the environment's reply."""
        self.end_turn()
        self._on_piece(Piece("reply", text, begins=True))

    def _cut(self, *, ended: bool) -> None:
        # The whole turn is decoded again, because the text of a token depends on the tokens before it. The
        # time is quadratic, but a turn is short: for 1,024 tokens it is half a second in all.
        turn = self._decode(self._tokens)
        for number, (tag, content) in enumerate(blocks(turn, ended=ended)):
            begins = number == len(self._shown)
            if begins:
                self._shown.append(0)
            new = content[self._shown[number] :]
            self._shown[number] = len(content)
            if new:
                self._on_piece(Piece(tag, new, begins))


class Dialogue:
    """Writes games as labelled and indented text that is safe to print."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._is_first = True  # no game has been written yet
        self._in_line = False  # the last line has no line break yet

    def question(self, text: str) -> None:
        """Write the question, as the heading of its game."""
        if not self._is_first:
            self._write("\n")
        self._is_first = False
        self.note("question", text, end="\n\n")

    def piece(self, piece: Piece) -> None:
        """Write a piece of the game."""
        if piece.kind == "reply":
            self.note(LABELS["reply"], piece.text.strip(), end="\n\n")
            return
        if piece.begins:
            self._end_line()
            self._write(LABELS[piece.kind].ljust(INDENT))
        self._write(_indented(piece.text))
        self._in_line = True

    def note(self, label: str, text: str, *, end: str = "\n") -> None:
        """Write a text with its label, on a line of its own."""
        self._end_line()
        self._write(f"{label.ljust(INDENT)}{_indented(text)}{end}")

    def _end_line(self) -> None:
        if self._in_line:
            self._write("\n")
        self._in_line = False


def _indented(text: str) -> str:
    return printable(text).replace("\n", "\n" + " " * INDENT)


def game_as_json(game: Trajectory, names: Mapping[str, str], *, priced: bool) -> dict[str, object]:
    """A game as an object for other programs, together with `names`.

    `answer` is null if the game ended without an answer, and `usd` is null if calls have no price.
    """
    return {
        "question": game.question.text,
        "answer": game.answer,
        "stop": game.stop,
        "error": game.error,
        "turns": [asdict(turn) for turn in game.turns],
        **names,
        **asdict(game.spent),
        "usd": game.spent.usd if priced else None,
        "seconds": game.seconds,
    }
