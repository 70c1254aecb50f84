"""What the neural environment reads: a world's facts as texts and as questions of one step, with answers.

Every answer is right, and no question needs two facts: comparisons of two films, chains of relations, word
problems and bare requests for a summary are not in it. What the model replies to those, nobody wrote.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from prompt_r1.miniworld.world import FILM_RELATIONS, PERSON_RELATIONS, YEARS, World

# Questions about a fact, for all relations and for each.
CLEAR = (
    "{who} is the {relation} of {subject}?",
    "Name the {relation} of {subject}.",
    "Please tell me the {relation} of {subject}.",
    "{subject}: {relation}?",
    "I want to know the {relation} of {subject}.",
)
OWN_WORDS = {
    "director": ("Who directed {subject}?", "{subject} was directed by whom?"),
    "composer": ("Who composed {subject}?", "Who composed the music of {subject}?"),
    "star": ("Who stars in {subject}?", "Who plays the lead in {subject}?"),
    "year": ("When was {subject} released?", "In which year was {subject} released?"),
    "genre": ("What kind of film is {subject}?",),
    "hero": ("What does the hero of {subject} do?",),
    "mother": ("Who gave birth to {subject}?", "{subject} is the child of which woman?"),
    "spouse": ("Who married {subject}?", "{subject} is married to whom?"),
    "teacher": ("Who taught {subject}?", "{subject} learned from whom?"),
    "birthplace": ("Where was {subject} born?", "{subject} comes from which city?"),
}
BEFORE = ("Was {subject} released before {year}?", "Did {subject} come out before {year}?")
DETAILS = (
    "Write a short summary of {subject} with its genre, hero and director.",
    "Give me genre, hero and director of {subject}.",
)
# A blank before each number: with it, a number is one token, and without it two.
SUMS = (
    "What is {left} {sign} {right}?",
    "How much is {left} {sign} {right}?",
    "Compute {left} {sign} {right}.",
)
ANSWER_ONLY = " Answer only."

# Statements about a fact, for the texts.
STATEMENTS = {
    "director": ("{subject} was directed by {value}.", "{value} directed {subject}."),
    "composer": ("The music of {subject} is by {value}.", "{value} composed {subject}."),
    "star": ("{value} stars in {subject}.", "{subject} stars {value}."),
    "year": ("{subject} was released in {value}.", "{subject} came out in {value}."),
    "genre": ("{subject} is a {value}.", "The genre of {subject} is {value}."),
    "hero": ("{subject} is about a {value}.", "The hero of {subject} is a {value}."),
    "mother": ("{value} is the mother of {subject}.", "{subject} is a child of {value}."),
    "spouse": ("{subject} is married to {value}.", "{value} is the spouse of {subject}."),
    "teacher": ("{value} taught {subject}.", "The teacher of {subject} is {value}."),
    "birthplace": ("{subject} was born in {value}.", "{subject} comes from {value}."),
}


@dataclass(frozen=True)
class Voice:
    """The sentences of an environment's replies; {value} is the answer."""

    fact: tuple[str, ...]
    verdict: Mapping[bool, tuple[str, ...]]


VOICES = {
    "A": Voice(
        ("It is {value}.", "I think it is {value}.", "The {relation} is {value}.", "Sure, {value}."),
        {True: ("Yes, it was.", "Sure, yes."), False: ("No, it was not.", "Sure, no.")},
    ),
    "B": Voice(
        ("{value}, I hope.", "Good question! {value}.", "The answer is {value}."),
        {True: ("The answer is yes.", "I hope yes."), False: ("The answer is no.", "I hope no.")},
    ),
}


@dataclass(frozen=True)
class Exchange:
    """A question of one step, its reply, and the value in the reply."""

    kind: str  # "fact", "before", "details" or "sum"
    prompt: str
    reply: str
    value: str


def statements(subject: str, world: World, rng: random.Random) -> str:
    """A text that states all facts of a subject, in random order."""
    relations = relations_of(subject, world)
    rng.shuffle(relations)
    return " ".join(
        rng.choice(STATEMENTS[relation]).format(subject=subject, value=world.facts[subject, relation])
        for relation in relations
    )


def exchange(subject: str, world: World, voice: Voice, rng: random.Random) -> Exchange:
    """A question about a subject."""
    is_film = (subject, "year") in world.facts
    kind = rng.choices(("fact", "before", "details"), (0.7, 0.2, 0.1) if is_film else (1, 0, 0))[0]
    if kind == "before":
        year = rng.choice(YEARS)
        early = world.facts[subject, "year"] < year
        prompt = rng.choice(BEFORE).format(subject=subject, year=year)
        return _reply(kind, prompt, "yes" if early else "no", voice.verdict[early], rng)
    if kind == "details":
        genre, hero, director = (world.facts[subject, each] for each in ("genre", "hero", "director"))
        value = f"a {genre} about a {hero}, directed by {director}"
        return _reply(kind, rng.choice(DETAILS).format(subject=subject), value, voice.fact[:2], rng)
    relation = rng.choice(relations_of(subject, world))
    who = "What" if relation in ("birthplace", "year", "genre", "hero") else "Who"
    own = OWN_WORDS[relation]
    casual = f"Any idea {own[0][0].lower()}{own[0][1:]}"
    prompt = rng.choice(CLEAR + own * 2 + (casual,))
    prompt = prompt.format(who=who, relation=relation, subject=subject)
    return _reply(kind, prompt, world.facts[subject, relation], voice.fact, rng, relation=relation)


def relations_of(subject: str, world: World) -> list[str]:
    """The relations of a film or a person."""
    return list(FILM_RELATIONS if (subject, "year") in world.facts else PERSON_RELATIONS)


def line_of_numbers(rng: random.Random) -> str:
    """A text that counts, forwards or backwards, by ones, twos or tens; the years are counted too."""
    low, high = rng.choice(((1, 118), (1950, 1999)))
    step = rng.choice((1, 1, 2, 10))
    start = rng.randint(low, high - 3 * step)
    line = [str(number) for number in range(start, high + 1, step)][:20]
    return " ".join(line if rng.random() < 0.7 else line[::-1])


def draw_sum(rng: random.Random) -> tuple[int, str, int, int]:
    """A sum like those of the word problems of the mini world, and its value."""
    left, right, sign = rng.randint(20, 80), rng.randint(2, 19), rng.choice(("plus", "minus"))
    return left, sign, right, left + right if sign == "plus" else left - right


def sum_exchange(voice: Voice, rng: random.Random) -> Exchange:
    """A question about a sum."""
    left, sign, right, value = draw_sum(rng)
    prompt = rng.choice(SUMS).format(left=left, sign=sign, right=right)
    return _reply("sum", prompt, str(value), voice.fact, rng, relation="result")


def _reply(
    kind: str, prompt: str, value: str, sentences: tuple[str, ...], rng: random.Random, relation: str = ""
) -> Exchange:
    """One exchange in five asks for the bare value."""
    if rng.random() < 0.2:
        return Exchange(kind, prompt + ANSWER_ONLY, value, value)
    return Exchange(kind, prompt, rng.choice(sentences).format(value=value, relation=relation), value)
