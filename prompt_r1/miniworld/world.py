"""A small world of films, people and cities, and the facts about them.

All worlds have the same words in their names but different facts: an agent that has learned to ask and copy
in other worlds knows no fact of this one. The world is divided 75/25 into two sides; no fact links one side
to the other.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

FIRST_NAMES = (
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Lukas Maria Nils Olga Peter "
    "Quinn Rosa Simon Tessa Ugo Vera Walter Yara"
).split()
# People with these first names may be mothers.
WOMEN = tuple("Anna Clara Elena Greta Irene Karin Maria Olga Quinn Rosa Tessa Vera Yara".split())
LAST_NAMES = (
    "Keller Novak Larsen Moreno Fischer Tanaka Rossi Duval Berger Lindqvist Okafor Petrov Silva "
    "Horvath Nakamura Weber Jensen Kowalski Marino Dubois Ortega Hansen Bauer Costa Ivanov Murray "
    "Santos Walsh Yilmaz Zeller Adler Farkas"
).split()
ADJECTIVES = (
    "Silver Golden Crimson Silent Broken Hidden Frozen Distant Burning Lonely Velvet Hollow Bitter "
    "Gentle Electric Scarlet Wild Ancient Midnight Paper"
).split()
NOUNS = (
    "River Garden Tower Harbor Mountain Mirror Winter Summer Kingdom Letter Promise Island Forest "
    "Bridge Storm Window Desert Train Lantern Empire Orchard Valley Ocean Shadow Crown Violin Compass "
    "Station Rose Dream"
).split()
CITY_PREFIXES = "Port Lake Fort Mount Saint New Upper Old".split()
GENRES = "drama comedy thriller western musical romance mystery fantasy".split()
HEROES = (
    "sailor doctor painter farmer soldier singer lawyer nurse pilot baker thief writer dancer king "
    "monk student"
).split()
YEARS = [str(year) for year in range(1950, 2000)]

CREW = ("director", "composer", "star")  # film → person
PERSON_RELATIONS = ("mother", "spouse", "teacher", "birthplace")  # person → person, or city
FILM_RELATIONS = (*CREW, "year", "genre", "hero")


@dataclass(frozen=True)
class Side:
    """The films, people and cities of one side of a world."""

    films: tuple[str, ...]
    people: tuple[str, ...]
    cities: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Two sides, and the facts about them."""

    seed: int | str
    train: Side
    test: Side
    # (subject, relation) → value, such as ("Silver River", "director") → a person
    facts: Mapping[tuple[str, str], str]

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The spelling of every film and person, by its lower-case form."""
        return {subject.lower(): subject for subject, _ in self.facts}

    def values(self, relation: str) -> Sequence[str]:
        """All values that `relation` can have: wrong but plausible answers are drawn from them."""
        people = self.train.people + self.test.people
        match relation:
            case "mother":
                return _women(people)
            case "birthplace":
                return self.train.cities + self.test.cities
            case "year":
                return YEARS
            case "genre":
                return GENRES
            case "hero":
                return HEROES
        return people


@lru_cache(maxsize=4)  # The environment and all questions of a run are of one world.
def make_world(seed: int | str) -> World:
    """Make the world of `seed`: 600 films, 768 people, 256 cities, the same in every process.

    The worlds of training and evaluation have integers as seeds, the worlds of the warm start have texts, so
    that an agent never starts with knowledge of a world that it plays in.
    """
    rng = random.Random(f"world {seed}")
    train_films, test_films = _divide(rng, ADJECTIVES, NOUNS)
    train_people, test_people = _divide(rng, FIRST_NAMES, LAST_NAMES)
    train_cities, test_cities = _divide(rng, CITY_PREFIXES, LAST_NAMES)
    train = Side(train_films, train_people, train_cities)
    test = Side(test_films, test_people, test_cities)
    facts = _draw_facts(rng, train)
    facts.update(_draw_facts(rng, test))
    return World(seed, train, test, facts)


def _divide(
    rng: random.Random, first_words: Sequence[str], second_words: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All names of two words, shuffled, and divided 75/25."""
    names = [f"{first} {second}" for first in first_words for second in second_words]
    rng.shuffle(names)
    cut = len(names) * 3 // 4
    return tuple(names[:cut]), tuple(names[cut:])


def _draw_facts(rng: random.Random, side: Side) -> dict[tuple[str, str], str]:
    """The facts about one side, by subject and relation. Their values are names of the same side."""
    facts = {}
    for film in side.films:
        for relation in CREW:
            facts[film, relation] = rng.choice(side.people)
        facts[film, "year"] = rng.choice(YEARS)
        facts[film, "genre"] = rng.choice(GENRES)
        facts[film, "hero"] = rng.choice(HEROES)
    women = _women(side.people)
    for person in side.people:
        mother = rng.choice([woman for woman in women if woman != person])
        others = [other for other in side.people if other not in (person, mother)]
        spouse, teacher = rng.sample(others, 2)
        facts[person, "mother"] = mother
        facts[person, "spouse"] = spouse
        facts[person, "teacher"] = teacher
        facts[person, "birthplace"] = rng.choice(side.cities)
    return facts


def _women(people: Sequence[str]) -> tuple[str, ...]:
    return tuple(person for person in people if person.startswith(WOMEN))
