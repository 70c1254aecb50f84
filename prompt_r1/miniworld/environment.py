"""The mini world's large language model, as rules.

It knows the facts of the world but no gold answer. It answers clear one-step questions, usually fails at
several steps at once, and often misreads casual wording. Its reply is a pure function of the seed, the style
and the last user message (of the last two, where the last asks only for the answer in the reply before), so
every process gets the same reply to the same prompt.

A prompt is parsed into a request first. Letter case, blanks and a "Question:" in front do not matter. A
question may be on a line of its own among other lines, such as instructions; it is not found inside a line.
"""

import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from prompt_r1.miniworld.wordings import WORDINGS
from prompt_r1.miniworld.world import (
    FILM_RELATIONS,
    GEN_WORDINGS,
    GENRES,
    PERSON_RELATIONS,
    POP_WORDINGS,
    SIGNS,
    Bridge,
    Compare,
    Gen,
    Pop,
    Problem,
    World,
    answer_of,
    make_world,
)
from prompt_r1.types import Message

OPPOSITE = {"yes": "no", "no": "yes"}
ANSWER_ONLY = re.compile(r"\s*answer only[.!]?\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Lookup:
    """One clear question: the `relation` of `subject`."""

    subject: str
    relation: str


@dataclass(frozen=True)
class BeforeYear:
    """Was `film` released before the year `other`? The replies have the words of those to Compare."""

    film: str
    other: str


@dataclass(frozen=True)
class Sum:
    """`left` plus or minus `right`."""

    left: str
    sign: str
    right: str


class Detailed(Gen):
    """A summary of `film` that names genre, hero and director."""


@dataclass(frozen=True)
class Vague:
    """Anything about `subject`."""

    subject: str


Request = Lookup | BeforeYear | Sum | Detailed | Vague | Bridge | Compare | Pop | Problem | Gen
Build = Callable[..., Request]


def _pattern(pattern: str, build: Build) -> tuple[re.Pattern[str], Build]:
    return re.compile(rf"(?:question:\s*)?{pattern}\s*[?.!]*", re.IGNORECASE), build


def _wording(template: str) -> str:
    """The pattern of a wording that contains {film}."""
    head, tail = template.rstrip("?.").split("{film}")
    return f"{re.escape(head)}{_FILM}{re.escape(tail)}"


def _problem(owner: str, start: str, things: str, verb: str, amount: str, then: str, second: str) -> Problem:
    verbs, amounts = (verb.lower(), then.lower()), (int(amount), int(second))
    return Problem(owner, things.lower(), int(start), verbs, amounts)


_RELATION = "|".join((*FILM_RELATIONS, *PERSON_RELATIONS))
_VERB = "|".join(SIGNS)
_ANY_PROBLEM = (
    rf"(?:problem:\s*)?(?P<owner>\w+) has (?P<start>\d+) (?P<things>\w+), "
    rf"(?P<verb>{_VERB}) (?P<amount>\d+)(?: more)? "
    rf"and then (?P<then>{_VERB}) (?P<second>\d+)(?: more)?\.\s*how many .+"
)
_DETAILS = r"(?=.*\bgenre\b)(?=.*\bhero\b)(?=.*\bdirector\b)"
_FILM, _SUBJECT = "(?P<film>.+?)", "(?P<subject>.+?)"

# Wordings of requests: the named groups of each pattern are the arguments of what builds the request.
FORMS = (
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
        _pattern(_wording(wording), partial(Pop, relation=relation))
        for relation, wordings in POP_WORDINGS.items()
        for wording in wordings
    ),
    *(_pattern(_DETAILS + _wording(wording) + r",? with .+", Detailed) for wording in GEN_WORDINGS),
    *(_pattern(_wording(wording), Gen) for wording in GEN_WORDINGS),
    _pattern(rf"tell me (?:something )?about {_SUBJECT}", Vague),
)


def understand(prompt: str, world: World) -> Request | None:
    """The request of the whole prompt, or else of the first line that is a request about known things."""
    for text in [prompt, *prompt.splitlines()[:100]]:
        words = " ".join(text.split())
        # No question is longer, and patterns with several wildcards are slow on long texts.
        if len(words) > 300:
            continue
        for pattern, build in FORMS:
            if match := pattern.fullmatch(words):
                request = build(**_slots(match, world))
                with suppress(KeyError):
                    truth_of(request, world)
                    return request
    return None


def _slots(match: re.Match[str], world: World) -> dict[str, str]:
    """The parts of a request, with names that are known in the world's spelling."""
    slots = match.groupdict()
    for slot in slots.keys() & {"relation", "first", "second", "sign"}:
        slots[slot] = slots[slot].lower()
    for slot in slots.keys() & {"film", "other", "subject"}:
        slots[slot] = world.names.get(slots[slot].lower(), slots[slot])
    return slots


def truth_of(request: Request, world: World) -> str:
    """The right answer. Raises KeyError for what the world has no fact about."""
    match request:
        case Lookup(subject, relation):
            return world.facts[subject, relation]
        case BeforeYear(film, year):
            return "yes" if world.facts[film, "year"] < year else "no"
        case Sum(left, sign, right):
            return str(int(left) + int(right) if sign == "plus" else int(left) - int(right))
        case Vague(subject):
            return world.names[subject.lower()]
    return answer_of(request, world)


@dataclass(frozen=True)
class Skills:
    """Probabilities of a right answer."""

    clear: float  # one clear one-step question
    sum: float  # one addition or subtraction
    hops: float  # two relations at once
    casual: float  # reading a casual question
    compare: float  # comparing two films at once
    problem: float  # a word problem of two steps at once
    details: float = 0.0  # a summary with genre, hero and director, although none of them is asked for
    bare: float = 1.0  # obeying "Answer only."


SKILLS = {
    "A": Skills(clear=0.99, sum=1.0, hops=0.15, casual=0.25, compare=0.3, problem=0.15),
    "B": Skills(clear=0.93, sum=0.93, hops=0.3, casual=0.4, compare=0.45, problem=0.35),
}
# The skill that a literal request takes, and the form of WORDINGS that its reply has (a usual one).
SKILL_AND_FORM = {
    Lookup: ("clear", "fact"),
    BeforeYear: ("clear", "yes"),
    Sum: ("sum", "sum"),
    Detailed: ("clear", "summary"),
    Gen: ("details", "summary"),
    Bridge: ("hops", "hops"),
    Compare: ("compare", "yes"),
    Problem: ("problem", "problem"),
}


@dataclass(frozen=True)
class MiniReply:
    """A reply in words, and the value in it."""

    text: str
    value: str  # a name, number or verdict; "" when the reply gives none


class MiniEnvironment:
    """Answers questions about a world: that of `seed`, unless another is given."""

    name, style, samples = "mini", "A", False

    def __init__(self, world: World | None = None, *, seed: int | str = 0) -> None:
        self.world = world or make_world(seed)
        self.seed = seed

    async def ask(self, messages: list[Message]) -> str:
        """Reply to the last user message, or with the value before if the message asks only for that."""
        rules, prompts = (
            [message["content"] for message in messages if message["role"] == role]
            for role in ("system", "user")
        )
        if len(prompts) > 1 and prompts[-1].lower().startswith("therefore, the answer is"):
            before = self.reply(prompts[-2], rules)
            return before.value or before.text
        return self.reply(prompts[-1], rules).text

    def skills(self, text: str) -> Skills:
        """The skills, whatever the text of the instructions and the prompt."""
        return SKILLS[self.style]

    def reply(self, prompt: str, instructions: Sequence[str] = ()) -> MiniReply:
        """Reply to a prompt; with the bare value if it ends with "Answer only." and that is obeyed."""
        skills = self.skills("\n".join([*instructions, prompt]))
        question = ANSWER_ONLY.sub("", prompt)
        # "Answer only." does not change the value.
        rng = _generator(f"{self.seed} {self.style}", question)
        request = understand(question, self.world)
        wordings = WORDINGS[self.style]
        if request is None:
            return MiniReply(rng.choice(wordings["confused"]), "")
        request = interpret(request, self.world, skills, rng)
        skill, form = SKILL_AND_FORM[type(request)]
        value = believe(request, self.world, self.style, getattr(skills, skill), rng)
        obeys = _generator(f"form {self.seed}", prompt).random() < skills.bare
        if value and question != prompt and obeys:
            return MiniReply(value, value)
        match request:
            case Lookup(relation="year"):
                form = "year"
            case Compare() | BeforeYear():
                form = value or "hedge"
        sentence = rng.choice(wordings[form])
        return MiniReply(sentence.format(value=value, **asdict(request)), value)


class MiniEnvironmentB(MiniEnvironment):
    """The same in style B, which has other wordings, skills and errors."""

    name, style = "mini-b", "B"


def _generator(seed: str, prompt: str) -> random.Random:
    """The random generator for a prompt, whatever its blanks and letter case."""
    text = f"{seed} {' '.join(prompt.split()).lower()}"
    return random.Random(text.encode("utf-8", "replace"))  # lone surrogates have no UTF-8


def interpret(request: Request, world: World, skills: Skills, rng: random.Random) -> Request:
    """Turn a casual or vague request into a clear one, which is often not the one that was meant."""
    match request:
        case Pop(film, relation):
            right = rng.random() < skills.casual
            return Lookup(film, relation if right else _other(relation, FILM_RELATIONS, rng))
        case Vague(subject):
            known = [relation for name, relation in world.facts if name == subject]
            return Lookup(subject, rng.choice(known))
    return request


def believe(request: Request, world: World, style: str, skill: float, rng: random.Random) -> str:
    """The answer to a literal request: the truth with probability `skill`; "" where it gives none."""
    truth = truth_of(request, world)
    if rng.random() < skill:
        return truth
    match request:
        case Lookup(_, relation):
            return _other(truth, world.values(relation), rng)
        case BeforeYear():
            return OPPOSITE[truth]
        case Compare():  # usually no answer; sometimes the wrong one, in style B half of the time
            return OPPOSITE[truth] if rng.random() < (0.5 if style == "B" else 0.1) else ""
        case Detailed(film):
            genre = world.facts[film, "genre"]
            return truth.replace(genre, _other(genre, GENRES, rng), 1)
        case Gen():
            return rng.choice(("a film that many people like", "a story about life", "a well known film"))
        case Bridge(film, first, second):
            # Style A names a wrong person or city; style B stops after the first relation.
            return world.facts[film, first] if style == "B" else _other(truth, world.values(second), rng)
        case Problem() if style == "B":  # it leaves out the second step
            return str(int(truth) - request.steps[1])
    return str(int(truth) + rng.choice([distance for distance in range(-9, 10) if distance]))


def _other(value: str, values: Sequence[str], rng: random.Random) -> str:
    return rng.choice([other for other in values if other != value])
