"""`mini-advice`: the mini environment with a reader of instructions.

Advice is read in system messages and in lines of the prompt that are not part of the question. It changes the
skills of style A (see `beliefs`), whichever words it is given in. All factors come before all gains, and a
gain closes that share of the gap to 1. `bare` is the probability that "Answer only." is obeyed (0.7 without
advice); otherwise the reply is a sentence.

Of two pieces of advice in conflict neither has an effect, and `clear` × 0.9. Each piece of advice beyond
MOST_ADVICE, and each 15 words beyond MOST_WORDS, leave only 0.8 of every gain.

Without advice, prompts that do not end with "Answer only." get the replies of `mini`. The luck of a question
does not depend on the advice, so a higher skill never loses a right answer.
"""

import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations

from prompt_r1.miniworld.beliefs import SKILLS, Skills
from prompt_r1.miniworld.environment import ANSWER_ONLY, MiniEnvironment, MiniReply, reply_to
from prompt_r1.miniworld.understanding import understand
from prompt_r1.miniworld.world import World
from prompt_r1.types import Message

MOST_ADVICE = 4  # pieces
MOST_WORDS = 60
MOST_CHARACTERS = 5000  # that are read; no gain is left of a text as long
KEPT_BY_EXCESS = 0.8  # of every gain, for each unit of excess
COST_OF_CONFLICT = 0.9  # of `clear`, for each conflict


@dataclass(frozen=True)
class Advice:
    """A piece of advice: how it is recognised, a short wording, and how it changes the skills."""

    pattern: str
    wording: str
    gains: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)


ADVICE = {
    "steps": Advice(
        r"step by step|(one|each) step|one (thing|relation) (at a time|after)|one after|break .*down",
        "Go step by step.",
        {"hops": 0.5, "problem": 0.4, "compare": 0.2},
        {"bare": 0.7},
    ),
    "years": Advice(
        r"\b(both|each|check|compare|look up|recall)\b[^.]*\b(year|date)s?\b",
        "Look up both years.",
        {"compare": 0.6},
    ),
    "sums": Advice(
        r"\b(one|each|every) (sum|calculation|operation)|running total|calculate after",
        "Do one sum after the other.",
        {"problem": 0.5},
    ),
    "rephrase": Advice(
        r"rephrase|plain words|casual|informal|colloquial", "Rephrase casual questions.", {"casual": 0.6}
    ),
    "details": Advice(
        r"genre|all (the )?details|hero and (the )?director",
        "Give genre, hero and director.",
        {"details": 0.8},
    ),
    "name": Advice(
        r"(name|number|answer|value)s? (alone|only)\b|only the|nothing but|(no|without a) (full )?sentence",
        "Reply with the name alone.",
        {"bare": 0.9},
    ),
    "check": Advice(
        r"double-check|check (every|each|the) (name|fact)|verify|careful",
        "Verify names.",
        {"hops": 0.1, "casual": 0.1},
    ),
    "guess": Advice(
        r"best guess|likeliest|most likely|make a guess",
        "If in doubt, give the likeliest answer.",
        {"compare": 0.1},
    ),
    "role": Advice(r"you are an? ", "You are an expert."),
    "quick": Advice(
        r"quick|immediately|(not|n't|without) think",
        "Be quick.",
        {"bare": 0.5},
        {"hops": 0.5, "problem": 0.5, "compare": 0.5, "clear": 0.95},
    ),
    "sentences": Advice(
        r"(in|use|with) (full |complete )sentence|explain|show your (work|reasoning)",
        "Explain.",
        factors={"bare": 0.3},
    ),
    "doubt": Advice(
        r"(not|n't|never) guess|\bunsure|not sure|\badmit",
        "Never guess.",
        factors={"hops": 0.8, "casual": 0.8, "compare": 0.8, "problem": 0.8},
    ),
    "fantasy": Advice(
        r"creativ|imaginat|vivid|entertain",
        "Be creative.",
        factors={"clear": 0.8, "casual": 0.8, "details": 0.7},
    ),
}
CONFLICTS = (("steps", "quick"), ("name", "sentences"), ("name", "details"), ("guess", "doubt"))
UNADVISED = replace(SKILLS["A"], bare=0.7)


def find_advice(text: str) -> frozenset[str]:
    """The names of the advice in a text, in any letter case."""
    words = " ".join(text[:MOST_CHARACTERS].lower().split())
    return frozenset(name for name, advice in ADVICE.items() if re.search(advice.pattern, words))


def advised(names: Iterable[str], *, words: int = 0) -> Skills:
    """The skills after advice that takes `words` words."""
    given = set(names)
    conflicts = [pair for pair in CONFLICTS if given.issuperset(pair)]
    effective = [ADVICE[name] for name in ADVICE if name in given.difference(*conflicts)]
    excess = max(0, len(given) - MOST_ADVICE) + max(0, math.ceil((words - MOST_WORDS) / 15))
    values = dict(vars(UNADVISED))
    for advice in effective:
        for skill, factor in advice.factors.items():
            values[skill] *= factor
    values["clear"] *= COST_OF_CONFLICT ** len(conflicts)
    for advice in effective:
        for skill, gain in advice.gains.items():
            values[skill] += (1 - values[skill]) * gain * KEPT_BY_EXCESS**excess
    return Skills(**values)


class AdvisedEnvironment:
    """The mini environment of style A, with the skills that the advice in the messages gives it."""

    def __init__(self, world: World, *, seed: int | str = 0) -> None:
        self.name = "mini-advice"
        self._environment = MiniEnvironment(world, "A", seed=seed)

    async def ask(self, messages: list[Message]) -> str:
        instructions = [message["content"] for message in messages if message["role"] == "system"]
        return reply_to(messages, partial(self.reply, instructions=instructions))

    def reply(self, prompt: str, instructions: Iterable[str] = ()) -> MiniReply:
        """Reply to a prompt under instructions; lines of the prompt may be instructions too."""
        question, advice = self._split(prompt)
        return self.reply_with(question, _skills_of("\n".join([*instructions, *advice])))

    def reply_with(self, prompt: str, skills: Skills) -> MiniReply:
        """Reply to a prompt without advice."""
        if ANSWER_ONLY.search(prompt) and skills.bare <= self.luck_of_form(prompt):
            prompt = ANSWER_ONLY.sub("", prompt)
        return self._environment.reply(prompt, skills)

    def luck_of_form(self, prompt: str) -> float:
        """ "Answer only." is obeyed if `bare` is above this number from 0 to 1."""
        seed = f"form {self._environment.seed} {' '.join(prompt.split()).lower()}"
        return random.Random(seed.encode("utf-8", "replace")).random()

    def _split(self, prompt: str) -> tuple[str, list[str]]:
        """The prompt without its lines of advice, and these lines."""
        kept: list[str] = []
        advice: list[str] = []
        for line in prompt.splitlines() or [""]:
            is_format = ANSWER_ONLY.fullmatch(line) is not None
            is_advice = not is_format and find_advice(line) and not self._is_question(line)
            (advice if is_advice else kept).append(line)
        return "\n".join(kept), advice

    def _is_question(self, line: str) -> bool:
        return understand(ANSWER_ONLY.sub("", line), self._environment.world) is not None


@cache
def _skills_of(instructions: str) -> Skills:
    return advised(find_advice(instructions), words=len(instructions.split()))


def every_prompt() -> Iterator[str]:
    """The shortest wording of each combination of advice: every state that a static prompt can cause."""
    for count in range(len(ADVICE) + 1):
        for names in combinations(ADVICE, count):
            yield " ".join(ADVICE[name].wording for name in names)
