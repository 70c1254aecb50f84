"""`mini-optimizer`: a script in place of the model that writes prompts, for the mini world and for tests.

It knows a few sentences of advice and picks among them at random, by seed, request and sample. It does not
read the criticism, so whatever a prompt optimiser finds with it is due to the optimiser's own selection.
"""

import random
from collections.abc import Mapping

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.types import Message

ADVICE = (
    "Think step by step before you answer.",
    "Work out each relation on its own, one after the other.",
    "Answer with the name alone.",
    "Write the number without its unit.",
    "Say yes or no where the question allows nothing else.",
    "Check every name against what you know.",
    "Do not guess: recall the fact first.",
    "Keep the answer short.",
    "Read casual wording with care: it asks for one plain fact.",
    "Do one sum at a time.",
    "Give all details that were asked for.",
    "You are an expert on films and the people behind them.",
)
CRITICISM = (
    "It does not say how to go about a question of several steps.",
    "It does not say in which form the answer is wanted.",
    "It is too general for questions of this kind.",
)
# Opening and closing marks: where an optimiser wants the new prompt, and where its request has the old one.
NEW_PROMPT_MARKS = (
    ("<INS>", "</INS>"),
    ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>"),
    ("```\n", "\n```"),
)
OLD_PROMPT_MARKS = (("<VARIABLE>", "</VARIABLE>"), ("```\n", "\n```"))
MOST_SENTENCES = 4


class MiniOptimizer:
    """Writes a new prompt between the marks that a request names; criticises where it names none."""

    name = "mini-optimizer"

    def __init__(self, *, seed: int) -> None:
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._seed = seed

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        request = messages[-1]["content"]
        rng = random.Random(f"{self._seed} {sample} {request}".encode("utf-8", "replace"))
        for opening, closing in NEW_PROMPT_MARKS:
            if opening in request:
                text = f"{opening}{_rewrite(request, rng)}{closing}"
                return Outcome("ok", text=text, finish="stop")
        return Outcome("ok", text=rng.choice(CRITICISM), finish="stop")

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _rewrite(request: str, rng: random.Random) -> str:
    """Add a sentence of advice to the prompt in the request, and drop the oldest beyond MOST_SENTENCES."""
    prompt = ""
    for opening, closing in OLD_PROMPT_MARKS:
        prompt = prompt or _between(request, opening, closing)
    kept = [sentence for sentence in ADVICE if sentence in prompt]
    new = rng.choice([sentence for sentence in ADVICE if sentence not in kept])
    return " ".join([*kept[-(MOST_SENTENCES - 1) :], new])


def _between(text: str, opening: str, closing: str) -> str:
    _, _, rest = text.partition(opening)
    return rest.partition(closing)[0]
