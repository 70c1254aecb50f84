"""Imperfect demonstrations for the warm start.

The demonstrator sees the meaning of a question (its slots) but not the gold answer: it plays against the real
environment and answers with the value of the last reply. Most strategies fail most of the time. The
warm-started agent therefore knows how to ask, read and copy, but does not prefer the strategies that work.
Reinforcement learning has to find them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.questions import (
    Bridge,
    Compare,
    Gen,
    Pop,
    Problem,
    Slots,
    make_questions,
    question_word,
    summary,
)
from prompt_r1.miniworld.world import CREW, GENRES, HEROES, World
from prompt_r1.protocol import parse
from prompt_r1.types import Question, Turn

WORLDS = 30  # the worlds that demonstrations are played in
GAMES = 400  # demonstrations in each world

# Strategy → its share of all demonstrations. "mixed up" is "decompose" with a wrong relation, film or number.
STRATEGIES = {
    "as it is": 0.46,
    "decompose": 0.26,
    "mixed up": 0.04,
    "stop early": 0.08,
    "vague": 0.08,
    "guess": 0.08,
}
MATH_STRATEGIES = {"as it is": 0.42, "decompose": 0.36, "mixed up": 0.04, "stop early": 0.10, "guess": 0.08}
SHARE_DAMAGED = 0.1  # the share of demonstrations with a damaged turn
DAMAGES = ("no think", "unclosed think", "no tag")

Plan = list[tuple[str, str]]
"""The thought and the prompt of each turn that asks. "{value}" stands for the value of the previous reply."""
Demonstration = tuple[Question, list[Turn]]
Demonstrator = Callable[[Slots, Question, MiniEnvironment, random.Random], Demonstration]
"""Plays one demonstration. It may replace the given question by another, so it returns the question too."""


def play_demonstration(
    slots: Slots, question: Question, environment: MiniEnvironment, rng: random.Random
) -> Demonstration:
    """Play a game with a strategy that is drawn at random."""
    shares = MATH_STRATEGIES if isinstance(slots, Problem) else STRATEGIES
    strategy = rng.choices(list(shares), list(shares.values()))[0]
    if strategy == "guess":
        return question, guess_at_once(slots, environment.world, rng)
    steps = decompose(slots)
    match strategy:
        case "decompose":
            plan = steps
        case "mixed up":
            plan = decompose(_mix_up(slots, environment.world, rng))
        case "stop early" if len(steps) > 1:
            plan = steps[:1]
        case "as it is" | "stop early":  # A question of one step cannot stop early, so it is asked as it is.
            plan = [("I ask it as it is.", question.text)]
        case _:
            assert strategy == "vague" and not isinstance(slots, Problem), (strategy, slots)
            plan = [("Let me see.", f"Tell me about {slots.film}.")]
    return question, perform(plan, environment, rng)


def demonstrations(
    seed: int,
    worlds: int = WORLDS,
    games: int = GAMES,
    *,
    kinds: Sequence[str] | None = None,
    demonstrator: Demonstrator = play_demonstration,
) -> Iterator[Demonstration]:
    """Yield `games` demonstrations in each of the worlds, on questions of these kinds (default: all)."""
    for number in range(worlds):
        world_seed = f"warm start {seed} world {number}"
        environment = MiniEnvironment(seed=world_seed)
        rng = random.Random(f"demonstrations {world_seed}")
        for slots, question in make_questions(environment.world, "train", games, kinds=kinds):
            yield demonstrator(slots, question, environment, rng)


def perform(plan: Plan, environment: MiniEnvironment, rng: random.Random) -> list[Turn]:
    """Play a plan, and answer with the value of the last reply, right or wrong."""
    *damages, last_damage = _draw_damages(len(plan) + 1, rng)
    turns: list[Turn] = []
    value = ""
    for (think, prompt), damage in zip(plan, damages, strict=True):
        text = _write(think, "interaction_prompt", prompt.replace("{value}", value), damage)
        action = parse(text)
        if action.prompt is None:  # The tag is missing, so the game ends without a call.
            return [*turns, Turn(text, action, None)]
        reply = environment.reply(action.prompt)
        turns.append(Turn(text, action, reply.text))
        value = reply.value
    if value:
        text = _write("Now I know the answer.", "answer", value, last_damage)
    else:
        text = _write("I was told nothing.", "answer", "unknown", last_damage)
    return [*turns, Turn(text, parse(text), None)]


def guess_at_once(slots: Slots, world: World, rng: random.Random) -> list[Turn]:
    """Answer without a request, with a random answer of the right type."""
    [damage] = _draw_damages(1, rng)
    text = _write("I think I know this.", "answer", _guess(slots, world, rng), damage)
    return [Turn(text, parse(text), None)]


def _draw_damages(count: int, rng: random.Random) -> list[str]:
    """For each of `count` turns, how it is damaged. One demonstration in ten has one damaged turn."""
    damages = [""] * count
    if rng.random() < SHARE_DAMAGED:
        damages[rng.randrange(count)] = rng.choice(DAMAGES)
    return damages


def decompose(slots: Slots) -> Plan:
    """The strategy that works: one clear one-step question per turn."""
    match slots:
        case Bridge(film, first, second):
            return [
                (f"First I need the {first}.", ask_clearly(film, first)),
                (f"Now I need the {second}.", ask_clearly("{value}", second)),
            ]
        case Compare(film, other):
            return [
                ("First I need the year.", ask_clearly(other, "year")),
                ("Now I can compare.", f"Was {film} released before {{value}}?"),
            ]
        case Pop(film, relation):
            return [(f"I need the {relation}.", ask_clearly(film, relation))]
        case Problem(_, _, start, verbs, amounts):
            return [
                (f"First, {verbs[0]} {amounts[0]}.", f"What is {start} {slots.signs[0]} {amounts[0]}?"),
                (f"And then {verbs[1]} {amounts[1]}.", f"What is {{value}} {slots.signs[1]} {amounts[1]}?"),
            ]
        case Gen(film):
            prompt = f"Write a short summary of {film} with its genre, hero and director."
            return [("I need the details.", prompt)]


def ask_clearly(subject: str, relation: str) -> str:
    """A clear one-step question."""
    if relation == "year":
        return f"When was {subject} released?"
    return f"{question_word(relation)} is the {relation} of {subject}?"


def _mix_up(slots: Slots, world: World, rng: random.Random) -> Slots:
    """Replace one of the slots by a wrong value."""
    match slots:
        case Bridge(_, first):
            return replace(slots, first=rng.choice([other for other in CREW if other != first]))
        case Problem(_, _, _, _, amounts):
            # The + 1 changes the problem even if both amounts are equal.
            return replace(slots, amounts=(amounts[1], amounts[0] + 1))
        case _:
            return replace(slots, film=rng.choice(world.train.films))


def _guess(slots: Slots, world: World, rng: random.Random) -> str:
    """A random answer of the right type."""
    match slots:
        case Compare():
            return rng.choice(("yes", "no"))
        case Problem():
            return str(rng.randint(2, 97))
        case Gen():
            genre = rng.choice(GENRES)
            hero = rng.choice(HEROES)
            return summary(genre, hero, rng.choice(world.train.people))
        case Bridge(_, _, relation) | Pop(_, relation):
            return rng.choice(world.values(relation))


def _write(think: str, tag: str, content: str, damage: str) -> str:
    """The text of one turn, which `damage` may spoil: one of DAMAGES, or ""."""
    match damage:
        case "no think":
            thought = ""
        case "unclosed think":
            thought = f"<think>{think}\n"
        case _:
            thought = f"<think>{think}</think>\n"
    if damage == "no tag":
        return thought + content
    # With blanks around it, a name has the same tokens as within a sentence, which makes it easier to copy.
    return f"{thought}<{tag}> {content} </{tag}>"
