"""`mini-optimizer`: plays the model that writes prompts, where there is none: in the mini world and in tests.

It is a script, not a language model. It knows a few sentences of advice and picks among them at random, by
seed, request and sample; it does not read what was criticised. So whatever an optimiser finds with it, the
optimiser's own choosing found.
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
MARKS = (("<INS>", "</INS>"), ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>"), ("```\n", "\n```"))
NOW = (("<VARIABLE>", "</VARIABLE>"), ("```\n", "\n```"))  # around the prompt that is to be rewritten
MOST_SENTENCES = 4


class MiniOptimizer:
    """Where a request names tags or a fence for a new prompt, it writes one there; else it criticises."""

    name = "mini-optimizer"

    def __init__(self, *, seed: int) -> None:
        self.parameters: Mapping[str, object] = {"seed": seed}
        self._seed = seed

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        request = messages[-1]["content"]
        rng = random.Random(f"{self._seed} {sample} {request}".encode("utf-8", "replace"))
        marks = next((pair for pair in MARKS if pair[0] in request), None)
        if marks is None:
            return Outcome("ok", text=rng.choice(CRITICISM), finish="stop")
        return Outcome("ok", text=f"{marks[0]}{_rewritten(request, rng)}{marks[1]}", finish="stop")

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _rewritten(request: str, rng: random.Random) -> str:
    """The prompt in the request with one more sentence of advice, the oldest going; or a new one."""
    spans = [_between(request, *marks) for marks in NOW]
    now = next((text for text in spans if text), "")
    kept = [sentence for sentence in ADVICE if sentence in now]
    new = rng.choice([sentence for sentence in ADVICE if sentence not in kept])
    return " ".join([*kept[-(MOST_SENTENCES - 1) :], new])


def _between(text: str, opening: str, closing: str) -> str:
    _, _, rest = text.partition(opening)
    return rest.partition(closing)[0]
