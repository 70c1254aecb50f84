"""The mini world's large language model, as rules.

It knows the facts of the world but no gold answer. Its reply is a pure function of the seed, the style and
the last user message (of the last two, where the last asks only for the answer in the reply before), so every
process gets the same reply to the same prompt.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from prompt_r1.miniworld.beliefs import SKILLS, Skills, Style, believe, interpret
from prompt_r1.miniworld.questions import Bridge, Compare, Problem
from prompt_r1.miniworld.understanding import BeforeYear, Lookup, Request, Sum, understand
from prompt_r1.miniworld.wordings import WORDINGS, Wordings
from prompt_r1.miniworld.world import World
from prompt_r1.types import Message

ANSWER_ONLY = re.compile(r"\s*answer only[.!]?\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class MiniReply:
    """A reply in words, and the value in it."""

    text: str
    value: str  # a name, number or verdict; "" when the reply gives none


class MiniEnvironment:
    """Answers questions about a world. Style B has other wordings, skills and errors than style A."""

    def __init__(self, world: World, style: Style = "A", *, seed: int | str = 0) -> None:
        self.name = {"A": "mini", "B": "mini-b"}[style]
        self.world = world
        self.style: Style = style
        self.seed = seed

    async def ask(self, messages: list[Message]) -> str:
        return reply_to(messages, self.reply)

    def reply(self, prompt: str, skills: Skills | None = None) -> MiniReply:
        """Reply to a prompt, with the skills of the style unless others are given.

        If the prompt ends with "Answer only.", the reply is the bare value.
        """
        skills = skills or SKILLS[self.style]
        question = ANSWER_ONLY.sub("", prompt)
        # Blanks, letter case and "Answer only." do not change the value.
        belief_seed = f"{self.seed} {self.style} {' '.join(question.split()).lower()}"
        rng = random.Random(belief_seed.encode("utf-8", "replace"))  # lone surrogates have no UTF-8
        request = understand(question, self.world)
        wordings = WORDINGS[self.style]
        if request is None:
            return MiniReply(rng.choice(wordings.confused), "")
        request = interpret(request, self.world, skills, rng)
        value = believe(request, self.world, self.style, skills, rng)
        bare_value_wanted = question != prompt
        if bare_value_wanted and value:
            return MiniReply(value, value)
        sentence = rng.choice(_sentences(wordings, request, value))
        return MiniReply(sentence.format(value=value, **_fields(request)), value)


def reply_to(messages: Sequence[Message], reply: Callable[[str], MiniReply]) -> str:
    """The reply to the last user message, or the bare answer in the one before if only that is asked for."""
    prompts = [message["content"] for message in messages if message["role"] == "user"]
    if len(prompts) > 1 and prompts[-1].lower().startswith("therefore, the answer is"):
        before = reply(prompts[-2])
        return before.value or before.text
    return reply(prompts[-1]).text


def _sentences(wordings: Wordings, request: Request, value: str) -> tuple[str, ...]:
    """The sentences from which the reply to a literal request is drawn."""
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
    """The values of a request for the placeholders of a sentence."""
    fields = asdict(request)
    if isinstance(request, BeforeYear):
        fields["other"] = request.year  # the sentences compare with {other}: a film or a year
    return fields
