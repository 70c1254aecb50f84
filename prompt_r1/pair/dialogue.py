"""Show a game while it is played: split it into pieces, and print them as text."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from prompt_r1.programs.text import printable

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


OnPiece = Callable[[Piece], object]
"""Gets each piece of a game while it is played."""


class DialogueSplitter:
    """Splits a game into pieces while it is played: the agent's turns token by token, and the replies.

    `decode` returns the text of a turn's tokens. `on_piece` gets each piece. The end of the text so far is
    held back in two cases: it may become a tag, or it is white space that may be the end of a block.
    """

    def __init__(self, decode: Callable[[list[int]], str], on_piece: OnPiece) -> None:
        self._decode = decode
        self._on_piece = on_piece
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._context: list[int] = []  # the last tokens whose text has become pieces
        self._new: list[int] = []  # the tokens after them, whose text has not
        self._held_back = self._decode([])  # The template may have opened the turn with a <think>.
        self._begin_block("")

    def _begin_block(self, name: str) -> None:
        self._name = name
        self._is_shown = False  # no piece of this block yet

    def add_token(self, token: int) -> None:
        """Add the next token of the agent's turn."""
        self._new.append(token)
        text = self._new_text()
        # A character of which only some bytes have been sampled is decoded as U+FFFD.
        if not text.endswith("\ufffd"):
            self._context, self._new = self._new, []
            self._split(text, ended=False)

    def end_turn(self) -> None:
        """End the agent's turn. What might still have become a tag is text now."""
        self._split(self._new_text(), ended=True)
        self._begin_turn()

    def add_reply(self, text: str) -> None:
        """End the agent's turn, and add the environment's reply."""
        self.end_turn()
        self._on_piece(Piece("reply", text, begins=True))

    def _new_text(self) -> str:
        """The text of the new tokens. It depends on the tokens before them: some tokenizers drop a blank."""
        before = self._decode(self._context)
        return self._decode(self._context + self._new)[len(before) :]

    def _split(self, text: str, *, ended: bool) -> None:
        """Show the next text of the turn without its tags, each of which begins a block."""
        text = self._held_back + text
        start = 0
        for tag in TAG.finditer(text):
            self._show(text[start : tag.start()].rstrip())
            is_closing = tag[1] == "/"
            self._begin_block("" if is_closing else tag[2])
            start = tag.end()
        last = text[start:]
        complete = last if ended else _without_half_a_tag(last)
        complete = complete.rstrip()
        self._show(complete)
        self._held_back = last[len(complete) :]

    def _show(self, text: str) -> None:
        begins = not self._is_shown
        if begins:
            text = text.lstrip()
        if text:
            self._on_piece(Piece(self._name, text, begins))
            self._is_shown = True


def _without_half_a_tag(text: str) -> str:
    """The text without an end that may become a tag, such as "<ans"."""
    bracket = text.rfind("<")
    may_become_a_tag = bracket >= 0 and len(text) - bracket < MAX_TAG
    return text[:bracket] if may_become_a_tag else text


class DialoguePrinter:
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
