"""A small world of films, people and cities.

The environment knows its facts, and the questions are about them. All worlds have the same words in their
names but different facts: an agent that has learned to ask and copy in other worlds knows no fact of this
one. The world is divided 75/25 into two sides; no fact links one side to the other.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Lukas Maria Nils Olga Peter "
    "Quinn Rosa Simon Tessa Ugo Vera Walter Yara"
)
# Who may be mothers.
WOMEN = _words("Anna Clara Elena Greta Irene Karin Maria Olga Quinn Rosa Tessa Vera Yara")
LAST_NAMES = _words(
    "Keller Novak Larsen Moreno Fischer Tanaka Rossi Duval Berger Lindqvist Okafor Petrov Silva "
    "Horvath Nakamura Weber Jensen Kowalski Marino Dubois Ortega Hansen Bauer Costa Ivanov Murray "
    "Santos Walsh Yilmaz Zeller Adler Farkas"
)
ADJECTIVES = _words(
    "Silver Golden Crimson Silent Broken Hidden Frozen Distant Burning Lonely Velvet Hollow Bitter "
    "Gentle Electric Scarlet Wild Ancient Midnight Paper"
)
NOUNS = _words(
    "River Garden Tower Harbor Mountain Mirror Winter Summer Kingdom Letter Promise Island Forest "
    "Bridge Storm Window Desert Train Lantern Empire Orchard Valley Ocean Shadow Crown Violin Compass "
    "Station Rose Dream"
)
CITY_PREFIXES = _words("Port Lake Fort Mount Saint New Upper Old")
GENRES = _words("drama comedy thriller western musical romance mystery fantasy")
HEROES = _words(
    "sailor doctor painter farmer soldier singer lawyer nurse pilot baker thief writer dancer king "
    "monk student"
)
YEARS = tuple(str(year) for year in range(1950, 2000))

CREW = ("director", "composer", "star")  # film → person
KIN = ("mother", "spouse", "teacher")  # person → person
PERSON_RELATIONS = (*KIN, "birthplace")
FILM_RELATIONS = (*CREW, "year", "genre", "hero")


@dataclass(frozen=True)
class Names:
    """The films, people and cities of one side."""

    films: tuple[str, ...]
    people: tuple[str, ...]
    cities: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Two sides of names, and the facts about them."""

    seed: int | str
    train: Names
    test: Names
    # By subject and relation: ("Silver River", "director") → a person.
    facts: Mapping[tuple[str, str], str]

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The spelling of every film and person, by its lower-case form."""
        return {subject.lower(): subject for subject, _ in self.facts}

    def values(self, relation: str) -> tuple[str, ...]:
        """All values that `relation` can have: wrong but plausible answers are drawn from them."""
        people = self.train.people + self.test.people
        tables = {
            "mother": _women(people),
            "birthplace": self.train.cities + self.test.cities,
            "year": YEARS,
            "genre": GENRES,
            "hero": HEROES,
        }
        return tables.get(relation, people)


def make_world(
    seed: int | str, *, films: int | None = None, people: int | None = None, cities: int | None = None
) -> World:
    """Make the world of `seed`: 600 films, 768 people, 256 cities or fewer, the same in every process.

    Worlds for training and evaluation have integer seeds; worlds of the warm start have strings, so that an
    agent never starts with knowledge of a world that it plays in.
    """
    rng = random.Random(f"world {seed}")
    cuts = (
        _cut(rng, [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS], films),
        _cut(rng, [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES], people),
        _cut(rng, [f"{prefix} {last}" for prefix in CITY_PREFIXES for last in LAST_NAMES], cities),
    )
    train, test = (Names(*names) for names in zip(*cuts, strict=True))
    facts: dict[tuple[str, str], str] = {}
    for names in (train, test):
        facts.update(_draw_facts(rng, names))
    return World(seed=seed, train=train, test=test, facts=facts)


def _cut(rng: random.Random, names: list[str], count: int | None) -> list[tuple[str, ...]]:
    """Shuffle the names, and divide `count` of them (None: all) 75/25."""
    rng.shuffle(names)
    names = names[:count]
    cut = len(names) * 3 // 4
    return [tuple(names[:cut]), tuple(names[cut:])]


def _draw_facts(rng: random.Random, names: Names) -> dict[tuple[str, str], str]:
    facts = {}
    for film in names.films:
        facts.update({(film, relation): rng.choice(names.people) for relation in CREW})
        facts[film, "year"] = rng.choice(YEARS)
        facts[film, "genre"] = rng.choice(GENRES)
        facts[film, "hero"] = rng.choice(HEROES)
    women = _women(names.people)
    for person in names.people:
        mother = rng.choice([woman for woman in women if woman != person])
        others = [other for other in names.people if other not in (person, mother)]
        kin = zip(KIN, (mother, *rng.sample(others, 2)), strict=True)
        facts.update({(person, relation): other for relation, other in kin})
        facts[person, "birthplace"] = rng.choice(names.cities)
    return facts


def _women(people: Sequence[str]) -> tuple[str, ...]:
    return tuple(person for person in people if person.startswith(WOMEN))
