"""The large language model of the mini world: rules that answer as large models do (see `beliefs`).

It knows the facts of the world, is never told a gold answer, and is a pure function of (seed, style, text of
the last user message): every process gets the same reply to the same prompt.
"""

import random
import re
from dataclasses import asdict, dataclass

from prompt_r1.miniworld.beliefs import Style, believe, take_literally
from prompt_r1.miniworld.questions import Bridge, Compare, Problem
from prompt_r1.miniworld.understanding import BeforeYear, Lookup, Request, Sum, understand
from prompt_r1.miniworld.wordings import WORDINGS, Wordings
from prompt_r1.miniworld.world import World
from prompt_r1.types import Message


@dataclass(frozen=True)
class Reply:
    """What the environment says, and what it thereby tells."""

    text: str
    value: str  # what the text tells; "" when it tells nothing


class MiniEnvironment:
    """Knows a world. Style B words its replies otherwise than A, has other skills and makes other errors."""

    def __init__(self, world: World, style: Style = "A", *, seed: int | str = 0) -> None:
        self.name = {"A": "mini", "B": "mini-b"}[style]
        self.world = world
        self.style: Style = style
        self.seed = seed

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        return self.reply(
            next(message["content"] for message in reversed(messages) if message["role"] == "user")
        ).text

    async def close(self) -> None:
        pass

    def reply(self, prompt: str) -> Reply:
        """The reply to a prompt; a bare answer where the prompt ends with "Answer only."."""
        asked = re.sub(r"\s*answer only[.!]?\s*$", "", prompt, flags=re.IGNORECASE)
        # Neither blanks and letter case nor the wish for a bare answer change what is believed.
        belief = f"{self.seed} {self.style} {' '.join(asked.split()).lower()}"
        rng = random.Random(belief.encode("utf-8", "replace"))  # lone surrogates have no UTF-8
        request = understand(asked, self.world)
        wordings = WORDINGS[self.style]
        if request is None:
            return Reply(rng.choice(wordings.confused), "")
        request = take_literally(request, self.world, self.style, rng)
        value = believe(request, self.world, self.style, rng)
        if asked != prompt and value:
            return Reply(value, value)
        sentence = rng.choice(_sentences(wordings, request, value))
        return Reply(sentence.format(value=value, **_fields(request)), value)


class MuteEnvironment:
    """Tells nothing: the ablation without environment."""

    name = "mini-mute"

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        return "I have nothing to say about this."

    async def close(self) -> None:
        pass


def _sentences(wordings: Wordings, request: Request, value: str) -> tuple[str, ...]:
    match request:
        case Compare() | BeforeYear():
            return wordings.verdict[value] if value else wordings.hedge
        case Lookup(_, relation):
            return wordings.year if relation == "year" else wordings.fact
        case Bridge():
            return wordings.hops
        case Sum():
            return wordings.sum
        case Problem():
            return wordings.problem
    return wordings.summary


def _fields(request: Request) -> dict[str, object]:
    """The request's slots, for the sentences; a year to compare with stands where the other film would."""
    fields = asdict(request)
    return {"other": fields["year"], **fields} if isinstance(request, BeforeYear) else fields
