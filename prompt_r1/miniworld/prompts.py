"""Read a prompt: which request it makes of the mini environment, and what the right answer is.

Letter case, blanks and a "Question:" in front do not matter. A question may stand on a line of its own among
other lines, such as instructions, but not within a line.
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
    answer_of,
)
from prompt_r1.miniworld.world import FILM_RELATIONS, PERSON_RELATIONS, World

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
class Details:
    """What is `film` about, with its genre, hero and director?"""

    film: str


@dataclass(frozen=True)
class Vague:
    """Anything about `subject`."""

    subject: str


# A literal request is answered as it stands. `interpret` turns the others into literal requests.
LiteralRequest = Lookup | BeforeYear | Sum | Details | Bridge | Compare | Problem | Gen
Request = LiteralRequest | Vague | Pop
Build = Callable[..., Request]
"""Builds a request from the named groups of a pattern, which are its arguments."""

# Parts of the patterns.
_RELATION = "|".join((*FILM_RELATIONS, *PERSON_RELATIONS))
_VERB = "|".join(SIGNS)
_FILM = "(?P<film>.+?)"
_SUBJECT = "(?P<subject>.+?)"
_NAMES_DETAILS = r"(?=.*\bgenre\b)(?=.*\bhero\b)(?=.*\bdirector\b)"  # These words follow, in any order.
_ANY_PROBLEM = (
    rf"(?:problem:\s*)?(?P<owner>\w+) has (?P<start>\d+) (?P<things>\w+), "
    rf"(?P<verb1>{_VERB}) (?P<amount1>\d+)(?: more)? "
    rf"and then (?P<verb2>{_VERB}) (?P<amount2>\d+)(?: more)?\.\s*how many .+"
)


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


# Each pattern with the function that builds its request. The first pattern that fits counts.
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
    *(_pattern(_NAMES_DETAILS + _regex_of(wording) + r",? with .+", Details) for wording in GEN_WORDINGS),
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
        case Details(film):
            return answer_of(Gen(film), world)
    return answer_of(request, world)
