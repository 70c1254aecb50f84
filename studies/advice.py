"""A mini world in which a better prompt helps, because its environment reads instructions.

Here the prompt optimisers search without a model or a key (docs/worlds.md, "Against searched prompts"):

    python evaluate.py --seed 0 --env py:studies.advice:environment_0 \\
        --optimizer-env py:studies.advice:optimizer_0 --method direct opro textgrad gepa …

Advice is a phrase of ADVICE, in a system message or in the prompt. It changes the skills of style A, and the
probability that "Answer only." is obeyed. If it is not obeyed, the reply is a sentence. The random numbers of
a prompt do not depend on its system message, so a higher skill never loses a right answer.

MiniOptimizer takes the place of a model that writes prompts. It draws advice, good or bad, and keeps most of
the advice in the request. It does not read why replies were wrong.
"""

import random

from prompt_r1.environments.sources import Caller
from prompt_r1.miniworld.environment import (
    ANSWER_ONLY,
    ANSWER_ONLY_AT_END,
    MiniEnvironment,
    MiniReply,
    Skills,
    generator_for,
)
from prompt_r1.settings.agent import ANSWER_IN_TAGS
from prompt_r1.types import Message

# How a phrase changes probabilities: a positive number closes this share of the gap to 1, a negative number
# takes this share away. "bare" is the probability that "Answer only." is obeyed. The others are skills.
ADVICE = {
    "step by step": {"hops": 0.5, "problem": 0.6, "compare": 0.2, "bare": -0.3},
    "look up both years": {"compare": 0.6},
    "rephrase casual questions": {"casual": 0.6},
    "give all details": {"gen": 0.8},
    "reply with the name alone": {"bare": 0.9},
    "double-check every name": {"hops": 0.1, "casual": 0.1},
    "be quick": {"hops": -0.5, "problem": -0.5, "compare": -0.5, "bare": 0.5},
    "explain your answer": {"bare": -0.7},
    "be creative": {"clear": -0.2, "casual": -0.2, "gen": -0.3},
}
BARE = 0.7  # the probability "bare" without advice
KEPT = 0.7  # the probability that advice in the request stays in the new prompt
# The marks before and after the new prompt, in the searches opro, textgrad and gepa.
MARKS = (("<INS>", "</INS>"), ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>"), ("```\n", "\n```"))


class AdvisedEnvironment(MiniEnvironment):
    """The mini environment of style A, with the skills that the advice in the messages gives it."""

    name = "mini-advice"

    instructions = ""  # the system messages of the request; `ask` never waits, so no other comes between

    async def ask(self, messages: list[Message]) -> str:
        """Reply to the last user message, with the advice in the system messages, too."""
        systems = [message["content"] for message in messages if message["role"] == "system"]
        self.instructions = "\n".join(systems)
        return await super().ask(messages)

    def reply(self, prompt: str) -> MiniReply:
        """Reply to a prompt. If it says "Answer only." and this is obeyed, the reply is the bare value."""
        # evaluate.py asks every environment for tags but the built-in mini world. These rules know no tags.
        prompt = prompt.replace(f"\n{ANSWER_IN_TAGS}", ANSWER_ONLY)
        probabilities = advised(f"{self.instructions}\n{prompt}")
        bare = probabilities.pop("bare")
        if generator_for(f"form {self.seed}", prompt).random() >= bare:
            prompt = ANSWER_ONLY_AT_END.sub("", prompt)
        self.skills = Skills(**probabilities)
        return super().reply(prompt)


def advised(text: str) -> dict[str, float]:
    """The skills and "bare" with the advice in a text, in any letter case. Losses are taken before gains."""
    words = " ".join(text.lower().split())
    effects = [effect for phrase in ADVICE if phrase in words for effect in ADVICE[phrase].items()]
    probabilities = {**vars(MiniEnvironment.skills), "bare": BARE}
    for name, share in effects:
        if share < 0:
            probabilities[name] += share * probabilities[name]
    for name, share in effects:
        if share > 0:
            probabilities[name] += share * (1 - probabilities[name])
    return probabilities


class MiniOptimizer:
    """Writes a new prompt between the marks that a request names. If it names none, it criticises."""

    name = "mini-optimizer"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    async def ask(self, messages: list[Message], caller: Caller) -> str:
        request = messages[-1]["content"]
        for opening, closing in MARKS:
            if opening in request:
                rng = random.Random(f"{self.seed} {caller.sample} {request}".encode("utf-8", "replace"))
                return f"{opening}{write_prompt(request.lower(), rng)}{closing}"
        return "The instruction lacks advice that would help here."


def write_prompt(request: str, rng: random.Random) -> str:
    """Most of the advice in the request, and one or two new pieces."""
    kept = [phrase for phrase in ADVICE if phrase in request and rng.random() < KEPT]
    new = rng.sample(list(ADVICE), rng.choice((1, 1, 2)))
    return " ".join(f"{phrase.capitalize()}." for phrase in dict.fromkeys(kept + new))


# For --seed N, --env is py:studies.advice:environment_N, which knows the world of this seed.
environment_0, environment_1, environment_2 = (AdvisedEnvironment(seed=seed) for seed in range(3))
optimizer_0, optimizer_1, optimizer_2 = (MiniOptimizer(seed) for seed in range(3))
