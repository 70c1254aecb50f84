"""The environment of the mini world: rules in place of a large language model.

It knows the facts of the world but no gold answer. It answers clear one-step questions, usually fails at
several steps at once, and often misreads casual wording. Its reply depends only on the seed, the style and
the last user message, so every process gets the same reply to the same prompt. There is one exception: the
second request of zero-shot chain of thought ("Therefore, the answer is …") gets only the value in the first
reply.

`understand` parses the prompt into a request. Letter case, blanks and a "Question:" in front do not matter. A
question may stand on a line of its own among other lines, such as instructions, but not within a line.
`interpret` reads casual words, often wrongly. The answer is the truth with the probability `chance_of`, and
a `wrong_answer` otherwise. WORDINGS has the sentences of the reply.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from prompt_r1.miniworld.questions import (
    GEN_WORDINGS,
    POP_WORDINGS,
    SIGNS,
    Bridge,
    Compare,
    Gen,
    Pop,
    Problem,
    answer_of,
    summary,
)
from prompt_r1.miniworld.wordings import WORDINGS
from prompt_r1.miniworld.world import FILM_RELATIONS, GENRES, PERSON_RELATIONS, World, make_world
from prompt_r1.types import Message

OPPOSITE = {"yes": "no", "no": "yes"}
NEARBY = [*range(-9, 0), *range(1, 10)]  # the differences between a wrong and the right result
ANSWER_ONLY = re.compile(r"\s*answer only[.!]?\s*$", re.IGNORECASE)
# The second request of chain of thought begins with these words (evaluation/ask_once.py).
ASKS_FOR_ANSWER_BEFORE = "therefore, the answer is"
MAX_REQUEST_CHARACTERS = 300  # Patterns with several wildcards are slow on longer texts.


@dataclass(frozen=True)
class Lookup:
    """One clear question: the `relation` of `subject`."""

    subject: str
    relation: str


@dataclass(frozen=True)
class BeforeYear:
    """Was `film` released before the year `other`?"""

    film: str
    other: str


@dataclass(frozen=True)
class Sum:
    """`left` plus or minus `right`."""

    left: str
    sign: str
    right: str


@dataclass(frozen=True)
class Vague:
    """Anything about `subject`."""

    subject: str


# A literal request is answered as it stands. `interpret` turns the others into literal requests.
LiteralRequest = Lookup | BeforeYear | Sum | Bridge | Compare | Problem | Gen
Request = LiteralRequest | Vague | Pop
Build = Callable[..., Request]
"""Builds a request from the named groups of a pattern, which are its arguments."""


def _pattern(pattern: str, build: Build) -> tuple[re.Pattern[str], Build]:
    """The pattern of a wording, and the function that builds a request from its named groups."""
    return re.compile(rf"(?:question:\s*)?{pattern}\s*[?.!]*", re.IGNORECASE), build


def _regex_of(template: str) -> str:
    """The regular expression of a wording that contains {film}."""
    head, tail = template.rstrip("?.").split("{film}")
    return f"{re.escape(head)}{_FILM}{re.escape(tail)}"


def _problem(
    owner: str, start: str, things: str, verb1: str, amount1: str, verb2: str, amount2: str
) -> Problem:
    """Build a word problem from the named groups of _ANY_PROBLEM."""
    return Problem(
        owner,
        things.lower(),
        int(start),
        verbs=(verb1.lower(), verb2.lower()),
        amounts=(int(amount1), int(amount2)),
    )


_RELATION = "|".join((*FILM_RELATIONS, *PERSON_RELATIONS))
_VERB = "|".join(SIGNS)
_ANY_PROBLEM = (
    rf"(?:problem:\s*)?(?P<owner>\w+) has (?P<start>\d+) (?P<things>\w+), "
    rf"(?P<verb1>{_VERB}) (?P<amount1>\d+)(?: more)? "
    rf"and then (?P<verb2>{_VERB}) (?P<amount2>\d+)(?: more)?\.\s*how many .+"
)
_DETAILS = r"(?=.*\bgenre\b)(?=.*\bhero\b)(?=.*\bdirector\b)"
_FILM = "(?P<film>.+?)"
_SUBJECT = "(?P<subject>.+?)"

# The named groups of a pattern are the arguments of the function beside it. The first that fits counts.
PATTERNS = (
    _pattern(rf"wh(?:o|at) is the (?P<second>{_RELATION}) of the (?P<first>{_RELATION}) of {_FILM}", Bridge),
    _pattern(rf"wh(?:o|at) is the (?P<relation>{_RELATION}) of {_SUBJECT}", Lookup),
    _pattern(rf"who directed {_SUBJECT}", partial(Lookup, relation="director")),
    _pattern(rf"who composed (?:the music (?:of|for) )?{_SUBJECT}", partial(Lookup, relation="composer")),
    _pattern(rf"who stars in {_SUBJECT}", partial(Lookup, relation="star")),
    _pattern(rf"(?:when|in (?:what|which) year) was {_SUBJECT} released", partial(Lookup, relation="year")),
    _pattern(rf"where was {_SUBJECT} born", partial(Lookup, relation="birthplace")),
    _pattern(rf"was {_FILM} released before (?P<other>\d{{4}})", BeforeYear),
    _pattern(rf"was {_FILM} released before (?P<other>.+?)", Compare),
    _pattern(r"(?:what|how much) is (?P<left>\d{1,6}) (?P<sign>plus|minus) (?P<right>\d{1,6})", Sum),
    _pattern(_ANY_PROBLEM, _problem),
    *(
        _pattern(_regex_of(wording), partial(Pop, relation=relation))
        for relation, wordings in POP_WORDINGS.items()
        for wording in wordings
    ),
    *(
        _pattern(_DETAILS + _regex_of(wording) + r",? with .+", partial(Gen, detailed=True))
        for wording in GEN_WORDINGS
    ),
    *(_pattern(_regex_of(wording), Gen) for wording in GEN_WORDINGS),
    _pattern(rf"tell me (?:something )?about {_SUBJECT}", Vague),
)


def understand(prompt: str, world: World) -> Request | None:
    """The request of the whole prompt, or else of the first line that is a request about known things."""
    for text in [prompt, *prompt.splitlines()[:100]]:
        words = " ".join(text.split())
        if len(words) > MAX_REQUEST_CHARACTERS:
            continue
        for pattern, build in PATTERNS:
            match = pattern.fullmatch(words)
            if match is None:
                continue
            request = build(**_slots(match, world))
            if _is_known(request, world):
                return request
    return None


def _is_known(request: Request, world: World) -> bool:
    """Whether the world has the facts that a request is about."""
    if isinstance(request, Vague):
        return request.subject.lower() in world.names
    try:
        truth_of(request, world)
    except KeyError:
        return False
    return True


def _slots(found: re.Match[str], world: World) -> dict[str, str]:
    """The parts of a request. Names that the world knows get the spelling of the world."""
    slots = found.groupdict()
    for slot, text in slots.items():
        match slot:
            case "relation" | "first" | "second" | "sign":
                slots[slot] = text.lower()
            case "film" | "other" | "subject":
                slots[slot] = world.names.get(text.lower(), text)
    return slots


def truth_of(request: LiteralRequest | Pop, world: World) -> str:
    """The right answer. Raises KeyError for what the world has no fact about."""
    match request:
        case Lookup(subject, relation):
            return world.facts[subject, relation]
        case BeforeYear(film, year):
            return "yes" if world.facts[film, "year"] < year else "no"
        case Sum(left, sign, right):
            change = int(right) if sign == "plus" else -int(right)
            return str(int(left) + change)
    return answer_of(request, world)


@dataclass(frozen=True)
class Skills:
    """The probabilities of a right answer, by the kind of request."""

    clear: float  # one clear one-step question
    sum: float  # one addition or subtraction
    hops: float  # two relations at once
    casual: float  # reading a casual question
    compare: float  # comparing two films at once
    problem: float  # a word problem of two steps at once
    details: float = 0.0  # a full summary for a question that does not name genre, hero and director


SKILLS = {
    "A": Skills(clear=0.99, sum=1.0, hops=0.15, casual=0.25, compare=0.3, problem=0.15),
    "B": Skills(clear=0.93, sum=0.93, hops=0.3, casual=0.4, compare=0.45, problem=0.35),
}


@dataclass(frozen=True)
class MiniReply:
    """A reply in words, and the value in it."""

    text: str
    value: str  # a name, a number, yes or no; "" if the reply gives no value


class MiniEnvironment:
    """Answers questions about a world: `world` if it is given, or else the world of `seed`."""

    name = "mini"
    style = "A"
    samples = False  # Equal prompts get equal replies, so the journal may reuse a reply.

    def __init__(self, world: World | None = None, *, seed: int | str = 0) -> None:
        self.world = world or make_world(seed)
        self.seed = seed

    async def ask(self, messages: list[Message]) -> str:
        """Reply to the last user message."""
        instructions = [message["content"] for message in messages if message["role"] == "system"]
        prompts = [message["content"] for message in messages if message["role"] == "user"]
        if len(prompts) > 1 and prompts[-1].lower().startswith(ASKS_FOR_ANSWER_BEFORE):
            before = self.reply(prompts[-2], instructions)
            return before.value or before.text
        return self.reply(prompts[-1], instructions).text

    def skills(self, text: str) -> Skills:
        """The skills for a request. `text` is the instructions and the prompt of the request.

        Here they are fixed. The subclass in studies/advice.py lets them depend on `text`.
        """
        return SKILLS[self.style]

    def reply(self, prompt: str, instructions: Sequence[str] = ()) -> MiniReply:
        """Reply to a prompt in a sentence, or with the bare value if the prompt ends with "Answer only."."""
        skills = self.skills("\n".join([*instructions, prompt]))
        question = ANSWER_ONLY.sub("", prompt)
        wordings = WORDINGS[self.style]
        # "Answer only." is not part of the seed: it changes the form of the reply, not the value.
        rng = generator_for(f"{self.seed} {self.style}", question)
        request = understand(question, self.world)
        if request is None:
            return MiniReply(rng.choice(wordings["confused"]), "")
        request = interpret(request, self.world, skills, rng)
        value = truth_of(request, self.world)
        if rng.random() >= chance_of(request, skills):
            value = self.wrong_answer(request, value, rng)
        asks_for_value_only = question != prompt
        if value and asks_for_value_only:
            return MiniReply(value, value)
        sentence = rng.choice(wordings[form_of_reply(request, value)])
        return MiniReply(sentence.format(value=value, **asdict(request)), value)

    def wrong_answer(self, request: LiteralRequest, truth: str, rng: random.Random) -> str:
        """What the environment believes in place of the truth; "" if it gives no answer."""
        facts = self.world.facts
        match request:
            case Lookup(_, relation) | Bridge(_, _, relation):
                return _other(truth, self.world.values(relation), rng)
            case BeforeYear():
                return OPPOSITE[truth]
            case Compare():  # Usually it gives no answer; sometimes it gives the wrong answer.
                return OPPOSITE[truth] if rng.random() < 0.1 else ""
            case Gen(film, detailed=True):
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

    def wrong_answer(self, request: LiteralRequest, truth: str, rng: random.Random) -> str:
        match request:
            case Bridge(film, first):  # It stops after the first relation.
                return self.world.facts[film, first]
            case Problem():  # It leaves out the second step.
                return str(int(truth) - request.steps[1])
            case Compare():  # It gives the wrong answer as often as no answer.
                return OPPOSITE[truth] if rng.random() < 0.5 else ""
        return super().wrong_answer(request, truth, rng)


def generator_for(seed: str, prompt: str) -> random.Random:
    """The random generator for a prompt, whatever its blanks and letter case."""
    text = f"{seed} {' '.join(prompt.split()).lower()}"
    return random.Random(text.encode("utf-8", "replace"))  # Lone surrogates have no UTF-8.


def chance_of(request: LiteralRequest, skills: Skills) -> float:
    """The probability of a right answer to a literal request."""
    match request:
        case Lookup() | BeforeYear() | Gen(detailed=True):
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
            return skills.details


def form_of_reply(request: LiteralRequest, value: str) -> str:
    """The key of WORDINGS under which the sentences for a literal request stand."""
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
        case Gen():
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
