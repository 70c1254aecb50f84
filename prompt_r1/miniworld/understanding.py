"""Parse a prompt into a request to the mini environment.

Letter case, blanks and a "Question:" in front do not matter. A question may be on a line of its own among
other lines, such as instructions; it is not found inside a line.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
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
)
from prompt_r1.miniworld.world import World


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
class Detailed:
    """A summary of `film` that names genre, hero and director."""

    film: str


@dataclass(frozen=True)
class Vague:
    """Anything about `subject`."""

    subject: str


Request = Lookup | BeforeYear | Sum | Detailed | Vague | Bridge | Compare | Pop | Problem | Gen
Build = Callable[..., Request]


def _form(pattern: str, build: Build) -> tuple[re.Pattern[str], Build]:
    return re.compile(rf"(?:question:\s*)?{pattern}\s*[?.!]*", re.IGNORECASE), build


def _wording(template: str) -> str:
    """The pattern of a wording that contains {film}."""
    head, tail = template.rstrip("?.").split("{film}")
    return f"{re.escape(head)}(?P<film>.+?){re.escape(tail)}"


def _before_year(film: str, year: str) -> BeforeYear:
    return BeforeYear(film, other=year)


def _problem(owner: str, start: str, things: str, verb: str, amount: str, then: str, second: str) -> Problem:
    verbs, amounts = (verb.lower(), then.lower()), (int(amount), int(second))
    return Problem(owner, things.lower(), int(start), verbs, amounts)


_RELATION = "director|composer|star|mother|spouse|teacher|birthplace|year|genre|hero"
_VERB = "|".join(SIGNS)
_ANY_PROBLEM = (
    rf"(?:problem:\s*)?(?P<owner>\w+) has (?P<start>\d+) (?P<things>\w+), "
    rf"(?P<verb>{_VERB}) (?P<amount>\d+)(?: more)? "
    rf"and then (?P<then>{_VERB}) (?P<second>\d+)(?: more)?\.\s*how many .+"
)
_DETAILS = r"(?=.*\bgenre\b)(?=.*\bhero\b)(?=.*\bdirector\b)"

_TWO_RELATIONS = rf"the (?P<second>{_RELATION}) of the (?P<first>{_RELATION})"

# Wordings of requests: the named groups of each pattern are the arguments of what builds the request.
FORMS = (
    _form(rf"(?:who|what) is {_TWO_RELATIONS} of (?P<film>.+?)", Bridge),
    _form(rf"(?:who|what) is the (?P<relation>{_RELATION}) of (?P<subject>.+?)", Lookup),
    _form(r"who directed (?P<subject>.+?)", partial(Lookup, relation="director")),
    _form(r"who composed (?:the music (?:of|for) )?(?P<subject>.+?)", partial(Lookup, relation="composer")),
    _form(r"who stars in (?P<subject>.+?)", partial(Lookup, relation="star")),
    _form(r"(?:when|in (?:what|which) year) was (?P<subject>.+?) released", partial(Lookup, relation="year")),
    _form(r"where was (?P<subject>.+?) born", partial(Lookup, relation="birthplace")),
    _form(r"was (?P<film>.+?) released before (?P<year>\d{4})", _before_year),
    _form(r"was (?P<film>.+?) released before (?P<other>.+?)", Compare),
    _form(r"(?:what|how much) is (?P<left>\d{1,6}) (?P<sign>plus|minus) (?P<right>\d{1,6})", Sum),
    _form(_ANY_PROBLEM, _problem),
    *(
        _form(_wording(wording), partial(Pop, relation=relation))
        for relation, wordings in POP_WORDINGS.items()
        for wording in wordings
    ),
    *(_form(_DETAILS + _wording(wording) + r",? with .+", Detailed) for wording in GEN_WORDINGS),
    *(_form(_wording(wording), Gen) for wording in GEN_WORDINGS),
    _form(r"tell me (?:something )?about (?P<subject>.+?)", Vague),
)


def understand(prompt: str, world: World) -> Request | None:
    """The request of the whole prompt, or else of the first line that is a request about known things."""
    for text in [prompt, *prompt.splitlines()[:100]]:
        words = " ".join(text.split())
        # No question is longer, and patterns with several wildcards are slow on long texts.
        if len(words) > 300:
            continue
        for pattern, build in FORMS:
            match = pattern.fullmatch(words)
            request = build(**_slots(match, world)) if match else None
            if request is not None and _makes_sense(request, world):
                return request
    return None


def _slots(match: re.Match[str], world: World) -> dict[str, str]:
    """The parts of a request, with names in the world's spelling ("": unknown)."""
    slots = match.groupdict()
    for slot in slots.keys() & {"relation", "first", "second", "sign"}:
        slots[slot] = slots[slot].lower()
    for slot in slots.keys() & {"film", "other", "subject"}:
        slots[slot] = world.names.get(slots[slot].lower(), "")
    return slots


def _makes_sense(request: Request, world: World) -> bool:
    """Return whether the world has the facts that the request is about."""
    facts = world.facts
    match request:
        case Lookup(subject, relation):
            return (subject, relation) in facts
        case Bridge(film, first, second):
            return (facts.get((film, first), ""), second) in facts
        case Compare(film, other):
            return (film, "year") in facts and (other, "year") in facts
        case Vague(subject):
            return subject != ""
        case Sum() | Problem():
            return True
        case Pop(film) | Gen(film) | Detailed(film) | BeforeYear(film):
            return (film, "year") in facts
