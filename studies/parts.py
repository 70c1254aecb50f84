"""Make an agent that was shown no chain of two facts: `python -m studies.parts --out runs/parts`.

The agent learns the format from demonstrations of these parts:

    one        a question of one step, in one of several wordings. The request has the clear wording
    two        two such questions, one after the other. The answer is the last reply
    as it is   a question of the mini world's training mix, asked as it is (or vaguely, or not at all)
    beginning  the first step of such a question. If the question needs another step, the game ends there

No request contains anything that only a reply has told. Bridge questions, comparisons and word problems need
an agent that uses a reply in its next request. It combines the parts in a way that it was never shown.

`--games 128` writes 128 such demonstrations for another model. Then the training mix has only bridge
questions:

    python -m studies.parts --games 128 --out runs/parts.jsonl
    python -m prompt_r1.training.warm_start --agent smollm2 --games runs/parts.jsonl --out runs/warm
"""

import argparse
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prompt_r1.miniworld.agent import build_agent
from prompt_r1.miniworld.demonstrations import ask_clearly, decompose, demonstrations, guess_at_once, perform
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.questions import OWNERS, SIGNS, THINGS, Problem, Slots
from prompt_r1.miniworld.world import CREW, PERSON_RELATIONS, YEARS, World
from prompt_r1.types import Question, Turn

SHARE_OF_STEPS = 0.65  # the share of the demonstrations "one" and "two"
SHARE_OF_TWO = 0.6  # the share of "two" in these demonstrations
STRATEGIES = {"as it is": 0.3, "beginning": 0.6, "vague": 0.05, "guess": 0.05}  # shares on the training mix
WORDINGS = ("{clear}", "{subject}: {short}?", "Tell me, {short} of {subject}?", "For {subject}, {short}?")
SHORT = {"birthplace": "what is the birthplace", "year": "the year"}
WORLDS = 8  # --games writes demonstrations of so many worlds
ORDERS = ("{one} And then: {other}", "{other} But first: {one}", "{one} {other}", "{other} {one}")
# Sentences beside the question itself, so that an agent learns which of the names the question is about.
ABOUT_FILMS = ("I just saw {name}.", "{name} is so good.", "This is about {name}.")
ABOUT_PEOPLE = ("I met {name}.", "{name} told me.", "This is about {name}.")


@dataclass(frozen=True)
class Step:
    """A question of one step."""

    text: str  # the question that the agent gets
    request: str  # the question in the clear wording, which the environment understands
    answer: str
    thoughts: tuple[str, str, str]  # before the only step, the first of two steps, and the second of two


def show_part(
    slots: Slots,
    question: Question,
    environment: MiniEnvironment,
    rng: random.Random,
    *,
    strategies: Mapping[str, float] = STRATEGIES,
) -> tuple[Question, list[Turn]]:
    """Demonstrate a part. The parts "one" and "two" replace the question of the training mix.

    `strategies` has the shares of the others: "as it is", "beginning", "vague" (a request that helps nobody)
    and "guess" (an answer without a request).
    """
    if rng.random() < SHARE_OF_STEPS:
        return _show_steps(environment, rng)
    return question, _show_start(slots, question, environment, rng, strategies)


def _show_steps(environment: MiniEnvironment, rng: random.Random) -> tuple[Question, list[Turn]]:
    """Demonstrate one step, or two steps that do not depend on each other."""
    one = _draw_step(environment.world, rng)
    other = _draw_step(environment.world, rng)
    # By chance, the first reply could name something that the second request contains. Then draw again.
    while environment.reply(one.request).value in other.request:
        other = _draw_step(environment.world, rng)
    if rng.random() < SHARE_OF_TWO:
        text = rng.choice(ORDERS).format(one=one.text, other=other.text)
        answer = other.answer
        plan = [(one.thoughts[1], one.request), (other.thoughts[2], other.request)]
    else:
        text = one.text
        answer = one.answer
        plan = [(one.thoughts[0], one.request)]
    question = Question(f"parts-{text}", "parts", text, (answer,))
    return question, perform(plan, environment, rng)


def _show_start(
    slots: Slots,
    question: Question,
    environment: MiniEnvironment,
    rng: random.Random,
    strategies: Mapping[str, float],
) -> list[Turn]:
    """Demonstrate a question of the training mix, asked as it is, or only its first step."""
    strategy = rng.choices(list(strategies), list(strategies.values()))[0]
    steps = decompose(slots)
    if strategy == "beginning":
        turns = perform(steps[:1], environment, rng)
        return turns[:1] if len(steps) > 1 else turns
    if strategy == "guess":
        return guess_at_once(slots, environment.world, rng)
    if strategy == "vague" and not isinstance(slots, Problem):
        plan = [("Let me see.", f"Tell me about {slots.film}.")]
    else:
        plan = [("I ask it as it is.", question.text)]
    return perform(plan, environment, rng)


def _draw_step(world: World, rng: random.Random) -> Step:
    """Draw a sum, a comparison with a year, or a fact about a person or film."""
    kind = rng.choices(("sum", "before", "person", "film"), (0.2, 0.15, 0.4, 0.25))[0]
    if kind == "sum":
        return _draw_sum(rng)
    subject = rng.choice(world.train.people if kind == "person" else world.train.films)
    if kind == "before":
        year = rng.choice(YEARS)
        text = request = f"Was {subject} released before {year}?"
        answer = "yes" if world.facts[subject, "year"] < year else "no"
        thought = "can compare."
    else:
        relation = rng.choice(PERSON_RELATIONS if kind == "person" else (*CREW, "year"))
        request = ask_clearly(subject, relation)
        answer = world.facts[subject, relation]
        thought = f"need the {relation}."
        short = SHORT.get(relation, f"who is the {relation}")
        text = rng.choice(WORDINGS).format(clear=request, subject=subject, short=short)
    if rng.random() < 0.6:
        about_film = kind == "person" or (kind == "before" and rng.random() < 0.5)
        name = rng.choice(world.train.films if about_film else world.train.people)
        aside = rng.choice(ABOUT_FILMS if about_film else ABOUT_PEOPLE).format(name=name)
        text = rng.choice((f"{aside} {text}", f"{text} {aside}"))
    return Step(text, request, answer, (f"I {thought}", f"First I {thought}", f"Now I {thought}"))


def _draw_sum(rng: random.Random) -> Step:
    """Draw a sum, written as a sum or as a word problem of one step."""
    start = rng.randint(20, 80)
    verb = rng.choice(list(SIGNS))
    amount = rng.randint(2, 19)
    owner = rng.choice(OWNERS)
    things = rng.choice(THINGS)
    request = f"What is {start} {SIGNS[verb]} {amount}?"
    more = " more" if SIGNS[verb] == "plus" else ""
    problem = f"{verb} {amount}{more}. How many {things} does {owner} have now?"
    texts = (
        request,
        f"Problem: {owner} has {start} {things} and {problem}",
        f"Problem: That makes {start}. And then {owner} {problem}",
        f"Problem: {rng.choice(OWNERS)} has {rng.randint(20, 80)} {things}. Sure, the result is {start}. "
        f"And then {owner} {problem}",
    )
    answer = start + amount if SIGNS[verb] == "plus" else start - amount
    thoughts = (f"I need {verb} {amount}.", f"First, {verb} {amount}.", f"And then {verb} {amount}.")
    return Step(rng.choice(texts), request, str(answer), thoughts)


def write_games(path: Path, count: int, seed: int, *, strategies: Mapping[str, float] = STRATEGIES) -> None:
    """Write `count` demonstrations about bridge questions for the warm start's --games."""
    demonstrator = partial(show_part, strategies=strategies)
    per_world = math.ceil(count / WORLDS)
    shown = list(demonstrations(seed, WORLDS, per_world, kinds=["bridge"], demonstrator=demonstrator))
    path.write_text("".join(game_line(question, turns) for question, turns in shown[:count]))


def game_line(question: Question, turns: list[Turn]) -> str:
    """A demonstration as a line of the file for the warm start's --games."""
    said = [{"text": turn.text, "reply": turn.reply} for turn in turns]
    return json.dumps({"question": question.text, "turns": said}) + "\n"


def main() -> None:
    """Build the agent of a seed, or write demonstrations."""
    parser = argparse.ArgumentParser("python -m studies.parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--games", type=int, default=0, help="write so many demonstrations, and no agent")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.games:
        write_games(given.out, given.games, given.seed)
        return
    model, tokenizer = build_agent(given.seed, demonstrations(given.seed, demonstrator=show_part))
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)


if __name__ == "__main__":
    main()
