"""`mini-advice`: the mini environment with a reader of instructions, in which a better prompt helps.

Advice is a phrase of ADVICE, in a system message or in the prompt. It changes the skills of style A, and the
probability 0.7 that "Answer only." is obeyed; otherwise the reply is a sentence. The luck of a prompt does
not depend on its system message, so a higher skill never loses a right answer.

`mini-optimizer` stands in for a model that writes prompts: it draws advice, good or bad, and keeps most of
what the request already contains. It does not read why replies were wrong.
"""

import random
from dataclasses import replace

from prompt_r1.miniworld.environment import SKILLS, MiniEnvironment, Skills
from prompt_r1.types import Message

# What a phrase does to skills: a gain closes this share of the gap to 1, a loss takes this share away.
ADVICE = {
    "step by step": {"hops": 0.5, "problem": 0.6, "compare": 0.2, "bare": -0.3},
    "look up both years": {"compare": 0.6},
    "rephrase casual questions": {"casual": 0.6},
    "give all details": {"details": 0.8},
    "reply with the name alone": {"bare": 0.9},
    "double-check every name": {"hops": 0.1, "casual": 0.1},
    "be quick": {"hops": -0.5, "problem": -0.5, "compare": -0.5, "bare": 0.5},
    "explain your answer": {"bare": -0.7},
    "be creative": {"clear": -0.2, "casual": -0.2, "details": -0.3},
}
KEPT = 0.7  # probability that advice in the request stays in the new prompt
# Opening and closing marks of the new prompt, by the search that asks for it: opro, textgrad, gepa.
MARKS = (("<INS>", "</INS>"), ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>"), ("```\n", "\n```"))
UNADVISED = replace(SKILLS["A"], bare=0.7)


class AdvisedEnvironment(MiniEnvironment):
    """The mini environment of style A, with the skills that the advice in the messages gives it."""

    name = "mini-advice"

    def skills(self, text: str) -> Skills:
        """The skills after the advice in a text, in any letter case. All losses come before all gains."""
        words = " ".join(text.lower().split())
        changes = [one for phrase, effects in ADVICE.items() if phrase in words for one in effects.items()]
        skills = dict(vars(UNADVISED))
        for name, share in sorted(changes, key=lambda change: change[1] > 0):
            skills[name] += share * (1 - skills[name] if share > 0 else skills[name])
        return Skills(**skills)


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
