"""A game as people read it: the agent's blocks and the environment's replies, as they come."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from prompt_r1.terminal import colour, printable
from prompt_r1.types import Turn

TAG = re.compile("<(/?)(think|interaction_prompt|answer)>")
LABELS = {"think": "agent thinks", "interaction_prompt": "agent asks", "answer": "answer", "": "agent writes"}
COLOURS = {"think": "dim", "interaction_prompt": "cyan", "answer": "green", "": "dim", "reply": "yellow"}
INDENT = 13  # columns of a label
LONGEST_TAG = len("</interaction_prompt>")


def blocks(text: str, *, ended: bool) -> list[tuple[str, str]]:
    """(tag name, content) in the order of a turn's text; "" names what stands outside of the blocks.

    While the turn has not ended, what may be the beginning of a tag or of a character is held back, so that
    each content only grows.
    """
    found: list[tuple[str, str]] = []
    name, start = "", 0
    for tag in TAG.finditer(text):
        found.append((name, text[start : tag.start()]))
        name, start = ("" if tag[1] else tag[2]), tag.end()
    rest = text[start:]
    if not ended:
        bracket = rest.rfind("<")
        if bracket >= 0 and len(rest) - bracket < LONGEST_TAG:
            rest = rest[:bracket]
        rest = rest.rstrip("\ufffd")
    found.append((name, rest))
    return [(name, content.strip()) for name, content in found if content.strip()]


class Dialogue:
    """Writes a game, labelled, indented, safe for a terminal; with colours if there are any."""

    def __init__(self, write: Callable[[str], object], *, colours: bool) -> None:
        self._write = write
        self._colours = colours
        self._games = 0
        self._shown: list[int] = []  # characters of each block of this turn that are written

    def question(self, text: str) -> None:
        """The question, above its dialogue."""
        self._write("\n" if self._games else "")
        self._games += 1
        self._label("question")
        self._say("bold", text)
        self._write("\n\n")

    def turn(self, text: str, *, ended: bool) -> None:
        """The agent's turn as far as it has come; writes what is new since the last call."""
        for number, (name, content) in enumerate(blocks(text, ended=ended)):
            if number == len(self._shown):
                if number:
                    self._write("\n")
                self._label(LABELS[name])
                self._shown.append(0)
            self._say(COLOURS[name], content[self._shown[number] :])
            self._shown[number] = len(content)
        if ended:
            self._write("\n" if self._shown else "")
            self._shown = []

    def reply(self, text: str) -> None:
        """What the environment replied."""
        self._label("environment")
        self._say(COLOURS["reply"], text.strip())
        self._write("\n\n")

    def note(self, label: str, text: str) -> None:
        """A line of ours."""
        self.end_line()
        self._label(label)
        self._say("dim", text)
        self._write("\n")

    def end_line(self) -> None:
        """End the turn's line where the turn was cut off."""
        self._write("\n" if self._shown else "")
        self._shown = []

    def _label(self, label: str) -> None:
        self._write(label.ljust(INDENT))

    def _say(self, name: str, text: str) -> None:
        text = printable(text).replace("\n", "\n" + " " * INDENT)
        self._write(colour(name, text) if self._colours else text)


@dataclass
class Game:
    """One question's dialogue, as far as it has come."""

    question: str
    turns: list[Turn] = field(default_factory=list)
    spoken: list[int] = field(default_factory=list)  # tokens of the turn that is being written
    stop: str = "interrupted"  # or how the game ended, see types.Stop
    error: str = ""
    cost: dict[str, float | None] = field(default_factory=dict)


def cost_line(cost: dict[str, float | None]) -> str:
    """Calls, tokens in + out, dollars where there is a price, seconds."""
    parts = [f"{cost['calls']:.0f} call{'s' * (cost['calls'] != 1)}"]
    if cost["tokens_in"] or cost["tokens_out"]:
        parts.append(f"{cost['tokens_in']:,.0f} + {cost['tokens_out']:,.0f} tokens")
    if cost["usd"] is not None:
        parts.append(f"${cost['usd']:.4f}")
    return ", ".join([*parts, f"{cost['seconds']:.1f} s"])


def as_json(game: Game, agent: str, environment: str) -> dict[str, object]:
    """The dialogue for programs. `answer` is null when there was none; `stop`: how the game ended."""
    return {
        "question": game.question,
        "answer": game.turns[-1].action.answer if game.turns else None,
        "stop": game.stop,
        "error": game.error,
        "turns": [asdict(turn) for turn in game.turns],
        "agent": agent,
        "environment": environment,
        **game.cost,
    }
