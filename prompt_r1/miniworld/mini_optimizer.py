"""`mini-optimizer`: a script in place of a model that writes prompts.

It writes advice that it draws from all that `mini-advice` understands, good or bad, and keeps most of what
the request already contains. It does not read why replies were wrong: the search has to find out what helps.
"""

import random

from prompt_r1.miniworld.advice import ADVICE
from prompt_r1.types import Message

KEPT = 0.7  # probability that advice in the request stays in the new prompt
# Opening and closing marks of the new prompt, by the search that asks for it: opro, textgrad, gepa.
MARKS = (("<INS>", "</INS>"), ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>"), ("```\n", "\n```"))


class MiniOptimizer:
    """Writes a new prompt between the marks that a request names; criticises where it names none."""

    name = "mini-optimizer"

    async def ask(self, messages: list[Message], *, sample: int = 0, seed: int = 0) -> str:
        request = messages[-1]["content"]
        for opening, closing in MARKS:
            if opening in request:
                rng = random.Random(f"{seed} {sample} {request}".encode("utf-8", "replace"))
                return f"{opening}{write_prompt(request.lower(), rng)}{closing}"
        return "The instruction lacks advice that would help here."


def write_prompt(request: str, rng: random.Random) -> str:
    """Advice of the request, most of it, and one or two pieces more."""
    kept = [phrase for phrase in ADVICE if phrase in request and rng.random() < KEPT]
    new = rng.sample(list(ADVICE), rng.choice((1, 1, 2)))
    return " ".join(f"{phrase.capitalize()}." for phrase in dict.fromkeys(kept + new))
