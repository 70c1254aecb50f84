"""The environment of the mini world: rules in place of a large language model.

It knows the facts of the world but no gold answer. It answers clear one-step questions, usually fails at
several steps at once, and often misreads casual wording. Its reply depends only on the seed, the style and
the last user message, so every process gets the same reply to the same prompt. There is one exception: the
second request of zero-shot chain of thought ("Therefore, the answer is …") gets only the value in the first
reply.

A reply is made in these steps:

1. `understand` (prompts.py) reads the request in the prompt.
2. `interpret` turns a casual request into a clear one, often not into the one that was meant.
3. The answer is the truth with the probability `chance_of`, and a `wrong_answer` otherwise.
4. WORDINGS has the sentences of the reply.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from prompt_r1.miniworld.prompts import (
    BeforeYear,
    Details,
    LiteralRequest,
    Lookup,
    Request,
    Sum,
    Vague,
    truth_of,
    understand,
)
from prompt_r1.miniworld.questions import Bridge, Compare, Gen, Pop, Problem, summary
from prompt_r1.miniworld.wordings import WORDINGS
from prompt_r1.miniworld.world import FILM_RELATIONS, GENRES, World, make_world
from prompt_r1.types import Message

OPPOSITE = {"yes": "no", "no": "yes"}
NEARBY = [*range(-9, 0), *range(1, 10)]  # the differences between a wrong and the right result
# The request for the bare value, after a question, and how it is recognised.
ANSWER_ONLY = " Answer only."
ANSWER_ONLY_AT_END = re.compile(r"\s*answer only[.!]?\s*$", re.IGNORECASE)
# The second request of zero-shot chain of thought begins with these words.
REQUEST_OF_COT = "Therefore, the answer is"


@dataclass(frozen=True)
class Skills:
    """The probabilities of a right answer, by the kind of request."""

    clear: float  # one clear one-step question
    sum: float  # one addition or subtraction
    hops: float  # two relations at once
    casual: float  # reading a casual question
    compare: float  # comparing two films at once
    problem: float  # a word problem of two steps at once
    gen: float = 0.0  # a full summary, although the question does not name genre, hero and director


@dataclass(frozen=True)
class MiniReply:
    """A reply in words, and the value in it."""

    text: str
    value: str  # a name, a number, yes or no; "" if the reply gives no value


class MiniEnvironment:
    """Answers questions about the world of `seed`."""

    name = "mini"
    style = "A"
    skills = Skills(clear=0.99, sum=1.0, hops=0.15, casual=0.25, compare=0.3, problem=0.15)
    contradicts = 0.1  # the share of failed comparisons that get a wrong answer; the others get no answer
    samples = False  # Equal prompts get equal replies, so the journal may reuse a reply.

    def __init__(self, *, seed: int | str = 0) -> None:
        self.world = make_world(seed)
        self.seed = seed

    async def ask(self, messages: list[Message]) -> str:
        """Reply to the last user message."""
        prompts = [message["content"] for message in messages if message["role"] == "user"]
        if len(prompts) > 1 and prompts[-1].lower().startswith(REQUEST_OF_COT.lower()):
            before = self.reply(prompts[-2])
            return before.value or before.text
        return self.reply(prompts[-1]).text

    def reply(self, prompt: str) -> MiniReply:
        """Reply to a prompt in a sentence, or with the bare value if the prompt ends with "Answer only."."""
        question = ANSWER_ONLY_AT_END.sub("", prompt)
        wordings = WORDINGS[self.style]
        # "Answer only." is not part of the seed: it changes the form of the reply, not the value.
        rng = generator_for(f"{self.seed} {self.style}", question)
        request = understand(question, self.world)
        if request is None:
            return MiniReply(rng.choice(wordings["confused"]), "")
        request = interpret(request, self.world, self.skills, rng)
        value = truth_of(request, self.world)
        if rng.random() >= chance_of(request, self.skills):
            value = self.wrong_answer(request, value, rng)
        asks_for_value_only = question != prompt
        if value and asks_for_value_only:
            return MiniReply(value, value)
        sentence = rng.choice(wordings[form_of_reply(request, value)])
        return MiniReply(sentence.format(value=value, **asdict(request)), value)

    def wrong_answer(self, request: LiteralRequest, truth: str, rng: random.Random) -> str:
        """A wrong answer in place of the truth; "" if the environment gives no answer."""
        facts = self.world.facts
        match request:
            case Lookup(_, relation) | Bridge(_, _, relation):
                return _other(truth, self.world.values(relation), rng)
            case BeforeYear():
                return OPPOSITE[truth]
            case Compare():
                return OPPOSITE[truth] if rng.random() < self.contradicts else ""
            case Details(film):
                other = _other(facts[film, "genre"], GENRES, rng)
                return summary(other, facts[film, "hero"], facts[film, "director"])
            case Gen():
                return rng.choice(("a film that many people like", "a story about life", "a well known film"))
            case Problem() | Sum():
                return str(int(truth) + rng.choice(NEARBY))


class MiniEnvironmentB(MiniEnvironment):
    """The same environment in style B, with other wordings, skills and errors."""

    name = "mini-b"
    style = "B"
    skills = Skills(clear=0.93, sum=0.93, hops=0.3, casual=0.4, compare=0.45, problem=0.35)
    contradicts = 0.5

    def wrong_answer(self, request: LiteralRequest, truth: str, rng: random.Random) -> str:
        match request:
            case Bridge(film, first):  # It stops after the first relation.
                return self.world.facts[film, first]
            case Problem():  # It leaves out the second step.
                return str(int(truth) - request.steps[1])
        return super().wrong_answer(request, truth, rng)


def generator_for(seed: str, prompt: str) -> random.Random:
    """The random generator for a prompt, whatever its blanks and letter case."""
    return random.Random(f"{seed} {' '.join(prompt.split()).lower()}")


def chance_of(request: LiteralRequest, skills: Skills) -> float:
    """The probability of a right answer to a literal request."""
    match request:
        case Lookup() | BeforeYear() | Details():
            return skills.clear
        case Sum():
            return skills.sum
        case Bridge():
            return skills.hops
        case Compare():
            return skills.compare
        case Problem():
            return skills.problem
        case Gen():
            return skills.gen


def form_of_reply(request: LiteralRequest, value: str) -> str:
    """The key in WORDINGS of the sentences that reply to a literal request."""
    match request:
        case Lookup(relation="year"):
            return "year"
        case Lookup():
            return "fact"
        case Sum():
            return "sum"
        case Bridge():
            return "hops"
        case BeforeYear() | Compare():
            return value or "hedge"
        case Problem():
            return "problem"
        case Details() | Gen():
            return "summary"


def interpret(request: Request, world: World, skills: Skills, rng: random.Random) -> LiteralRequest:
    """Turn a casual or vague request into a clear one, often not into the one that was meant."""
    match request:
        case Pop(film, relation):
            right = rng.random() < skills.casual
            return Lookup(film, relation if right else _other(relation, FILM_RELATIONS, rng))
        case Vague(subject):
            known = [relation for name, relation in world.facts if name == subject]
            return Lookup(subject, rng.choice(known))
    return request


def _other(value: str, values: Sequence[str], rng: random.Random) -> str:
    """A random one of `values`, but not `value`."""
    return rng.choice([other for other in values if other != value])
