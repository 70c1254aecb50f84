"""What the mini environment believes: right with the probability of its skill, else wrong in the way of its
style.

One clear question is answered well, several steps at once badly, and casual wording is often misread. No
function here sees a question's gold answer: what is true is worked out from the facts of the world.
"""

import random
from dataclasses import dataclass
from typing import Literal

from prompt_r1.miniworld.questions import Bridge, Compare, Gen, Pop, Problem, answer_of
from prompt_r1.miniworld.understanding import BeforeYear, Detailed, Lookup, Request, Sum, Vague
from prompt_r1.miniworld.world import FILM_RELATIONS, GENRES, PERSON_RELATIONS, World

Style = Literal["A", "B"]


@dataclass(frozen=True)
class Skills:
    """Probabilities to be right."""

    clear: float  # one clear question
    sum: float  # one addition or subtraction
    hops: float  # two relations at once
    casual: float  # reading a casual question
    compare: float  # two films at once
    problem: float  # a word problem in one go


SKILLS = {
    "A": Skills(clear=0.99, sum=1.0, hops=0.15, casual=0.25, compare=0.3, problem=0.15),
    "B": Skills(clear=0.93, sum=0.93, hops=0.3, casual=0.4, compare=0.45, problem=0.35),
}


def take_literally(request: Request, world: World, style: Style, rng: random.Random) -> Request:
    """What a casual or vague question is taken for: a clear one, seldom the one that was meant."""
    match request:
        case Pop(film, relation):
            right = rng.random() < SKILLS[style].casual
            return Lookup(film, relation if right else _other(relation, FILM_RELATIONS, rng))
        case Vague(subject):
            known = [
                relation
                for relation in (*FILM_RELATIONS, *PERSON_RELATIONS)
                if (subject, relation) in world.facts
            ]
            return Lookup(subject, rng.choice(known))
    return request


def believe(request: Request, world: World, style: Style, rng: random.Random) -> str:
    """The value that is told about a literal request; "" where the environment will not say."""
    skills, luck = SKILLS[style], rng.random()
    match request:
        case Lookup(subject, relation):
            truth = world.facts[subject, relation]
            return truth if luck < skills.clear else _other(truth, world.values(relation), rng)
        case BeforeYear(film, year):
            right = luck < skills.clear
            return _yes_or_no((world.facts[film, "year"] < year) == right)
        case Detailed(film):
            truth = answer_of(Gen(film), world)
            genre = world.facts[film, "genre"]
            return truth if luck < skills.clear else truth.replace(genre, _other(genre, GENRES, rng), 1)
        case Gen():
            return rng.choice(("a film that many people like", "a story about life", "a well known film"))
        case Sum(left, sign, right):
            total = int(left) + int(right) if sign == "plus" else int(left) - int(right)
            return str(total if luck < skills.sum else _miscount(total, rng))
        case Bridge():
            right = luck < skills.hops
            return answer_of(request, world) if right else _lost_hop(request, world, style, rng)
        case Compare():
            right = luck < skills.compare
            return answer_of(request, world) if right else _lost_comparison(request, world, style, rng)
        case Problem():
            right = luck < skills.problem
            return answer_of(request, world) if right else _lost_count(request, world, style, rng)
    raise AssertionError(f"not a literal request: {request}")


def _lost_hop(request: Bridge, world: World, style: Style, rng: random.Random) -> str:
    """A confident wrong person (or city); B stops after the first relation."""
    if style == "B":
        return world.facts[request.film, request.first]
    return _other(answer_of(request, world), world.values(request.second), rng)


def _lost_comparison(request: Compare, world: World, style: Style, rng: random.Random) -> str:
    """Mostly a hedge; B is as often simply wrong."""
    wrong = _yes_or_no(answer_of(request, world) == "no")
    return wrong if rng.random() < (0.5 if style == "B" else 0.1) else ""


def _lost_count(request: Problem, world: World, style: Style, rng: random.Random) -> str:
    """A wrong total; B leaves the second step out."""
    total = int(answer_of(request, world))
    return str(total - request.steps[1] if style == "B" else _miscount(total, rng))


def _other(value: str, values: tuple[str, ...], rng: random.Random) -> str:
    return rng.choice([other for other in values if other != value])


def _miscount(total: int, rng: random.Random) -> int:
    return total + rng.choice([distance for distance in range(-9, 10) if distance])


def _yes_or_no(truth: bool) -> str:
    return "yes" if truth else "no"
