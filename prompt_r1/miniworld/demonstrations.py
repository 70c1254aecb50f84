"""Imperfect demonstrations for the warm start: every strategy, good and bad, in the right format.

The demonstrator sees what a question means (its slots), never the gold answer: it plays against the real
environment and answers what it was told. Most of its strategies fail most of the time, so that the
warm-started agent knows how to ask, read and copy but prefers nothing that pays; to find that out is left to
reinforcement learning.
"""

import random
from dataclasses import dataclass, replace

from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.questions import SIGNS, Bridge, Compare, Gen, MiniQuestion, Pop, Problem, Slots
from prompt_r1.miniworld.world import CREW, GENRES, HEROES, World
from prompt_r1.protocol import Codec, parse
from prompt_r1.types import Completion, Question, Trajectory, Turn

# Shares of the strategies. "mixed up" decomposes with one relation, film or number wrong.
STRATEGIES = {
    "as it is": 0.46,
    "decompose": 0.26,
    "mixed up": 0.04,
    "stop early": 0.08,
    "vague": 0.08,
    "guess": 0.08,
}
MATH_STRATEGIES = {"as it is": 0.42, "decompose": 0.36, "mixed up": 0.04, "stop early": 0.10, "guess": 0.08}
DAMAGED = 0.1
DAMAGES = ("no think", "unclosed think", "no tag")


@dataclass(frozen=True)
class Step:
    """One turn that asks; "{value}" in the prompt stands for what the turn before was told."""

    think: str
    prompt: str


def demonstrate(mini: MiniQuestion, environment: MiniEnvironment, rng: random.Random) -> list[Turn]:
    """Play one game with a strategy drawn at random; one demonstration in ten has a damaged turn."""
    steps, world = _draw_steps(mini, environment.world, rng), environment.world
    damages = [""] * (len(steps) + 1)
    if rng.random() < DAMAGED:
        damages[rng.randrange(len(damages))] = rng.choice(DAMAGES)
    turns: list[Turn] = []
    value = ""
    for step, damage in zip(steps, damages, strict=False):
        text = _write(step.think, "interaction_prompt", step.prompt.format(value=value), damage)
        action = parse(text)
        if action.prompt is None:  # without a tag nobody is asked and the game is over
            return [*turns, Turn(text, action, None)]
        reply = environment.reply(action.prompt)
        turns.append(Turn(text, action, reply.text))
        value = reply.value
    if steps:
        # It repeats what it was told, be it right or wrong, and does not guess where it was told nothing.
        think, answer = ("Now I know the answer.", value) if value else ("I was told nothing.", "unknown")
    else:
        think, answer = "I think I know this.", _guess(mini.slots, world, rng)
    text = _write(think, "answer", answer, damages[-1])
    return [*turns, Turn(text, parse(text), None)]


def record(question: Question, turns: list[Turn], codec: Codec) -> Trajectory:
    """The demonstration token by token, as a rollout would have recorded it."""
    trajectory = Trajectory(question)
    trajectory.add_context(codec.opening(question.text))
    for turn in turns:
        tokens = [*codec.tokenizer(turn.text, add_special_tokens=False)["input_ids"], codec.turn_end]
        trajectory.add_sampled(Completion(tokens, [0.0] * len(tokens), finished=True))
        trajectory.turns.append(turn)
        if turn.reply is not None:
            trajectory.add_context(codec.reply(turn.reply, after=codec.turn_end))
    trajectory.stop = "malformed" if trajectory.answer is None else "answered"
    return trajectory


def decompose(slots: Slots) -> list[Step]:
    """The good strategy: one clear question after the other."""
    match slots:
        case Bridge(film, first, second):
            return [
                Step(f"First I need the {first}.", _clear(film, first)),
                Step(f"Now I need the {second}.", _clear("{value}", second)),
            ]
        case Compare(film, other):
            return [
                Step("First I need the year.", _clear(other, "year")),
                Step("Now I can compare.", f"Was {film} released before {{value}}?"),
            ]
        case Pop(film, relation):
            return [Step(f"I need the {relation}.", _clear(film, relation))]
        case Problem(_, _, start, verbs, amounts):
            signs = [SIGNS[verb] for verb in verbs]
            return [
                Step(f"First, {verbs[0]} {amounts[0]}.", f"What is {start} {signs[0]} {amounts[0]}?"),
                Step(f"And then {verbs[1]} {amounts[1]}.", f"What is {{value}} {signs[1]} {amounts[1]}?"),
            ]
        case Gen(film):
            prompt = f"Write a short summary of {film} with its genre, hero and director."
            return [Step("I need the details.", prompt)]


def _clear(subject: str, relation: str) -> str:
    if relation == "year":
        return f"When was {subject} released?"
    return f"{'What' if relation == 'birthplace' else 'Who'} is the {relation} of {subject}?"


def _draw_steps(mini: MiniQuestion, world: World, rng: random.Random) -> list[Step]:
    slots = mini.slots
    shares = MATH_STRATEGIES if isinstance(slots, Problem) else STRATEGIES
    strategy = rng.choices(list(shares), list(shares.values()))[0]
    plan = decompose(_mix_up(slots, world, rng) if strategy == "mixed up" else slots)
    if strategy == "guess":
        return []
    if strategy == "vague":
        assert not isinstance(slots, Problem), "a problem has no film: its strategies are MATH_STRATEGIES"
        return [Step("Let me see.", f"Tell me about {slots.film}.")]
    if strategy == "stop early" and len(plan) > 1:
        return plan[:1]
    if strategy in ("decompose", "mixed up"):
        return plan
    return [Step("I ask it as it is.", mini.question.text)]


def _mix_up(slots: Slots, world: World, rng: random.Random) -> Slots:
    """The same slots with one of them wrong."""
    match slots:
        case Bridge(_, first):
            return replace(slots, first=rng.choice([other for other in CREW if other != first]))
        case Problem(_, _, _, _, amounts):
            return replace(slots, amounts=(amounts[1], amounts[0] + 1))
        case _:
            return replace(slots, film=rng.choice(world.train.films))


def _guess(slots: Slots, world: World, rng: random.Random) -> str:
    match slots:
        case Compare():
            return rng.choice(("yes", "no"))
        case Problem():
            return str(rng.randint(2, 97))
        case Gen():
            genre, hero, director = (rng.choice(each) for each in (GENRES, HEROES, world.train.people))
            return f"a {genre} about a {hero}, directed by {director}"
        case Bridge(_, _, relation) | Pop(_, relation):
            return rng.choice(world.values(relation))


def _write(think: str, tag: str, content: str, damage: str) -> str:
    """One turn of the agent, whole or damaged."""
    thought = {"no think": "", "unclosed think": f"<think>{think}\n"}.get(damage, f"<think>{think}</think>\n")
    # The blank makes a name that begins an answer the token that it is within a sentence: easier to copy.
    return thought + (content if damage == "no tag" else f"<{tag}> {content} </{tag}>")
