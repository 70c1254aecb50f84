"""The cheap environment of the mini world, and the demonstrations that name it."""

import random
from collections import defaultdict
from statistics import fmean

from prompt_r1.metrics.text import exact_match
from prompt_r1.miniworld import MiniEnvironment, make_questions, make_world
from prompt_r1.miniworld.demonstrations import decompose, demonstrate
from prompt_r1.miniworld.questions import answer_of
from prompt_r1.miniworld.routing.agent import ENVIRONMENTS, AnyEnvironment, with_names
from prompt_r1.miniworld.routing.small import SmallEnvironment
from prompt_r1.miniworld.understanding import understand
from prompt_r1.options.routes import address, names_in

WORLD = make_world(0)
MINI, SMALL = MiniEnvironment(WORLD, "A", seed=0), SmallEnvironment(WORLD, seed=0)


def decomposed(kind: str, environments: tuple[MiniEnvironment, MiniEnvironment]) -> float:
    """The share of questions that clear single questions answer, the first and the last by these."""
    right = []
    for mini in make_questions(WORLD, "train", 200, 0, kinds=[kind]):
        value = ""
        for turn, environment in zip(decompose(mini.slots), environments, strict=False):
            value = environment.reply(turn.prompt.format(value=value)).value
        right.append(exact_match(value, [answer_of(mini.slots, WORLD)]))
    return fmean(right)


def test_it_replies_to_facts_and_summaries_as_mini_does():
    prompts = [one.question.text for one in make_questions(WORLD, "train", 200, 0, kinds=["pop", "gen"])]
    for kind in ("bridge", "pop", "gen"):
        for mini in make_questions(WORLD, "train", 100, 1, kinds=[kind]):
            prompts += [turn.prompt for turn in decompose(mini.slots)[:1]]
    prompts += ["Tell me about nothing.", "Hello?", f"{prompts[0]} Answer only."]
    assert [SMALL.reply(prompt) for prompt in prompts] == [MINI.reply(prompt) for prompt in prompts]


def test_it_can_neither_compare_nor_calculate():
    assert decomposed("bridge", (SMALL, SMALL)) > 0.95
    assert decomposed("compare", (SMALL, MINI)) > 0.95
    assert 0.4 < decomposed("compare", (MINI, SMALL)) < 0.6
    assert decomposed("math", (MINI, MINI)) == 1
    assert decomposed("math", (MINI, SMALL)) < 0.2
    assert decomposed("math", (SMALL, MINI)) < 0.2


def test_several_steps_at_once_are_too_much_for_it():
    for kind in ("bridge", "compare", "math"):
        questions = make_questions(WORLD, "train", 200, 0, kinds=[kind])
        values = [SMALL.reply(one.question.text).value for one in questions]
        assert fmean(exact_match(v, q.question.answers) for v, q in zip(values, questions, strict=True)) == 0


def test_demonstrations_name_the_environment_that_replied_and_prefer_none_for_any_request():
    environment, rng = AnyEnvironment(0, random.Random(0)), random.Random(1)
    chosen = defaultdict(list)
    for mini in make_questions(WORLD, "train", 1000, 0):
        environment.asked.clear()
        turns = demonstrate(mini, environment, rng)
        for turn in with_names(turns, environment.asked):
            if turn.reply is None:
                continue
            addressed = address([{"role": "user", "content": turn.action.prompt}], names_in(ENVIRONMENTS))
            prompt = addressed.messages[0]["content"]
            assert (MINI, SMALL)[addressed.environment].reply(prompt).text == turn.reply
            chosen[type(understand(prompt, WORLD))].append(addressed.environment)
    assert len(chosen) == 10
    for request, numbers in chosen.items():
        assert abs(fmean(numbers) - 0.5) < 4 * 0.5 / len(numbers) ** 0.5, request
