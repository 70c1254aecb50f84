"""Show a game as text."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from prompt_r1.programs.terminal import printable
from prompt_r1.types import Trajectory

TAG = re.compile("<(/?)(think|interaction_prompt|answer)>")
LABELS = {
    "think": "agent thinks",
    "interaction_prompt": "agent asks",
    "answer": "answer",
    "": "agent writes",
    "reply": "environment",
}
INDENT = 13  # width of the labels
LONGEST_TAG = len("</interaction_prompt>")


@dataclass(frozen=True)
class Piece:
    """The next part of a dialogue: of a block of the agent's turn, or the environment's whole reply."""

    kind: str  # tag of the block ("": outside all tags), or "reply"
    text: str
    begins: bool  # whether it is the first of its block


def blocks(text: str, *, ended: bool) -> list[tuple[str, str]]:
    """Split a turn into (tag name, content) blocks, in order. Text outside all tags has the name "".

    Until the turn has `ended`, text that may be the beginning of a tag or of a multi-byte character is left
    out, so that the content of a block only grows from call to call.
    """
    contents, slashes, names = (TAG.split(text)[group::3] for group in range(3))
    tags = ["", *("" if slash else name for slash, name in zip(slashes, names, strict=True))]
    if not ended:
        *contents, last = contents
        bracket = last.rfind("<")
        if bracket >= 0 and len(last) - bracket < LONGEST_TAG:
            last = last[:bracket]
        contents.append(last.rstrip("\ufffd"))
    return [(tag, text.strip()) for tag, text in zip(tags, contents, strict=True) if text.strip()]


class Pieces:
    """Cuts a game into pieces while it is played."""

    def __init__(self, on_piece: Callable[[Piece], object]) -> None:
        self._on_piece = on_piece
        self._sent: list[int] = []  # characters of each block of the turn so far

    def turn(self, text: str, *, ended: bool) -> None:
        """The agent's turn so far: after each token, and when it has ended."""
        for number, (tag, content) in enumerate(blocks(text, ended=ended)):
            begins = number == len(self._sent)
            if begins:
                self._sent.append(0)
            if new := content[self._sent[number] :]:
                self._on_piece(Piece(tag, new, begins))
            self._sent[number] = len(content)
        if ended:
            self._sent = []

    def reply(self, text: str) -> None:
        """The environment's reply."""
        self._on_piece(Piece("reply", text, begins=True))


class Dialogue:
    """Writes a game as labelled and indented text that is safe to print."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._games = 0
        self._in_line = False  # the agent's text has not ended yet

    def question(self, text: str) -> None:
        """Write the question, as the heading of its game."""
        self._write("\n" if self._games else "")
        self._games += 1
        self.note("question", text, end="\n\n")

    def piece(self, piece: Piece) -> None:
        """Write a piece of the game."""
        if piece.kind == "reply":
            self.note(LABELS["reply"], piece.text.strip(), end="\n\n")
            return
        if piece.begins:
            self.end_line()
            self._write(LABELS[piece.kind].ljust(INDENT))
        self._write(_indented(piece.text))
        self._in_line = True

    def note(self, label: str, text: str, *, end: str = "\n") -> None:
        """Write a text with its label; an error may have cut off the turn before it."""
        self.end_line()
        self._write(f"{label.ljust(INDENT)}{_indented(text)}{end}")

    def end_line(self) -> None:
        """End the line of the agent's text, so that readers of a pipe get it before the reply comes."""
        self._write("\n" if self._in_line else "")
        self._in_line = False


def _indented(text: str) -> str:
    return printable(text).replace("\n", "\n" + " " * INDENT)


def game_as_json(game: Trajectory, names: Mapping[str, str], *, priced: bool) -> dict[str, object]:
    """A game for programs, with these `names`; `answer` is null without one, and `usd` without a price."""
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
