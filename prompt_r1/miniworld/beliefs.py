"""What the mini environment believes, right or wrong.

It answers clear one-step questions, usually fails at several steps at once, and often misreads casual
wording. No function here sees a question's gold answer: the truth is computed from the facts of the world.
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


def interpret(request: Request, world: World, skills: Skills, rng: random.Random) -> Request:
    """Turn a casual or vague request into a clear one, which is often not the one that was meant."""
    match request:
        case Pop(film, relation):
            right = rng.random() < skills.casual
            return Lookup(film, relation if right else _other(relation, FILM_RELATIONS, rng))
        case Vague(subject):
            relations = (*FILM_RELATIONS, *PERSON_RELATIONS)
            known = [relation for relation in relations if (subject, relation) in world.facts]
            return Lookup(subject, rng.choice(known))
    return request


def believe(request: Request, world: World, style: Style, skills: Skills, rng: random.Random) -> str:
    """The environment's answer to a clear request; "" where it gives none."""
    luck = rng.random()
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
            if luck < skills.clear:
                return truth
            return truth.replace(genre, _other(genre, GENRES, rng), 1)
        case Gen() if luck < skills.details:
            return answer_of(request, world)
        case Gen():
            return rng.choice(("a film that many people like", "a story about life", "a well known film"))
        case Sum(left, sign, right):
            total = int(left) + int(right) if sign == "plus" else int(left) - int(right)
            return str(total if luck < skills.sum else _miscount(total, rng))
        case Bridge():
            right = luck < skills.hops
            return answer_of(request, world) if right else _wrong_bridge(request, world, style, rng)
        case Compare():
            right = luck < skills.compare
            return answer_of(request, world) if right else _wrong_comparison(request, world, style, rng)
        case Problem():
            right = luck < skills.problem
            return answer_of(request, world) if right else _wrong_total(request, world, style, rng)
    raise AssertionError(f"interpret() left {request}")


def _wrong_bridge(request: Bridge, world: World, style: Style, rng: random.Random) -> str:
    """Style A names a wrong person or city; style B stops after the first relation."""
    if style == "B":
        return world.facts[request.film, request.first]
    return _other(answer_of(request, world), world.values(request.second), rng)


def _wrong_comparison(request: Compare, world: World, style: Style, rng: random.Random) -> str:
    """Usually no answer; sometimes the wrong one, in style B half of the time."""
    wrong = _yes_or_no(answer_of(request, world) == "no")
    share_wrong = 0.5 if style == "B" else 0.1
    return wrong if rng.random() < share_wrong else ""


def _wrong_total(request: Problem, world: World, style: Style, rng: random.Random) -> str:
    """Style A miscounts; style B leaves out the second step."""
    total = int(answer_of(request, world))
    if style == "B":
        return str(total - request.steps[1])
    return str(_miscount(total, rng))


def _other(value: str, values: tuple[str, ...], rng: random.Random) -> str:
    return rng.choice([other for other in values if other != value])


def _miscount(total: int, rng: random.Random) -> int:
    return total + rng.choice([distance for distance in range(-9, 10) if distance])


def _yes_or_no(truth: bool) -> str:
    return "yes" if truth else "no"
