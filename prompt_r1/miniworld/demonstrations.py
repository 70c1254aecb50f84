"""Imperfect demonstrations for the warm start.

The demonstrator sees the meaning of a question (its slots) but not the gold answer: it plays against the real
environment and answers with the value of the last reply. Most strategies fail most of the time. The
warm-started agent therefore knows how to ask, read and copy, but does not prefer the strategies that work.
Reinforcement learning has to find them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

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
        case "vague":
            assert not isinstance(slots, Problem), "MATH_STRATEGIES has no vague questions"
            plan = [("Let me see.", f"Tell me about {slots.film}.")]
        case _:
            assert strategy == "guess", strategy
            plan = []
    guessed = partial(guess, slots, environment.world, rng)
    return question, perform(plan, environment, rng, fallback=guessed)


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


def perform(
    plan: Plan, environment: MiniEnvironment, rng: random.Random, *, fallback: Callable[[], str]
) -> list[Turn]:
    """Play a plan and answer with the value of the last reply; without a plan, with the `fallback`.

    One demonstration in ten has a damaged turn.
    """
    count = len(plan) + 1  # the number of turns; the last turn answers
    damages = [""] * count
    if rng.random() < SHARE_DAMAGED:
        damages[rng.randrange(count)] = rng.choice(DAMAGES)
    turns: list[Turn] = []
    value = ""
    for number, (think, prompt) in enumerate(plan):
        asked = prompt.replace("{value}", value)
        text = _write(think, "interaction_prompt", asked, damages[number])
        action = parse(text)
        if action.prompt is None:  # The tag is missing, so the game ends without a call.
            return [*turns, Turn(text, action, None)]
        reply = environment.reply(action.prompt)
        turns.append(Turn(text, action, reply.text))
        value = reply.value
    if not plan:
        think, answer = "I think I know this.", fallback()
    elif value:
        think, answer = "Now I know the answer.", value  # right or wrong
    else:
        think, answer = "I was told nothing.", "unknown"
    text = _write(think, "answer", answer, damages[-1])
    return [*turns, Turn(text, parse(text), None)]


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


def guess(slots: Slots, world: World, rng: random.Random) -> str:
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
