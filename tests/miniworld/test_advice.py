"""The environment that reads instructions: what each piece of advice does to its answers."""

import asyncio
import time
from statistics import mean

import pytest

from prompt_r1.metrics.em_f1 import exact_match
from prompt_r1.miniworld import MiniEnvironment, make_questions, make_world
from prompt_r1.miniworld.advice import (
    ADVICE,
    CONFLICTS,
    MOST_WORDS,
    UNADVISED,
    AdvisedEnvironment,
    advised,
    every_prompt,
    find_advice,
)
from prompt_r1.types import Message

WORLD = make_world(0)
ENVIRONMENT = AdvisedEnvironment(WORLD, seed=0)


def answers(kind: str, *instructions: str, count: int = 400) -> list[bool]:
    """Whether the bare replies to questions of a kind are right."""
    found = []
    for mini in make_questions(WORLD, "train", count, 0, kinds=[kind]):
        reply = ENVIRONMENT.reply(f"{mini.question.text} Answer only.", instructions)
        found.append(exact_match(reply.text, mini.question.answers) == 1)
    return found


def test_each_wording_is_understood_as_its_own_advice_and_as_nothing_else():
    assert {name: find_advice(one.wording) for name, one in ADVICE.items()} == {
        name: {name} for name in ADVICE
    }
    assert find_advice("Answer the question as well as you can.") == set()


def test_without_advice_it_replies_as_the_mini_environment_does():
    mini = MiniEnvironment(WORLD, "A", seed=0)
    prompts = [one.question.text for one in make_questions(WORLD, "train", 200, 0)]
    prompts += ["Tell me about nothing.", "", "Who is the\ndirector of X?", *("12 plus 7?" for _ in range(2))]
    assert [ENVIRONMENT.reply(prompt) for prompt in prompts] == [mini.reply(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("kind", "names", "skill"),
    [
        ("bridge", ["name"], 0.15),
        ("bridge", ["steps", "name"], 0.15 + 0.85 * 0.5),
        ("math", ["sums", "name"], 0.15 + 0.85 * 0.5),
        ("compare", ["years", "name"], 0.3 + 0.7 * 0.6),
        ("pop", ["rephrase", "name"], 0.25 + 0.75 * 0.6),
        ("gen", ["details"], 0.8),
    ],
)
def test_the_share_of_right_answers_is_the_skill_that_the_advice_gives(kind, names, skill):
    right = answers(kind, *(ADVICE[name].wording for name in names))
    obeyed = advised(names).bare
    assert mean(right) == pytest.approx(skill * obeyed, abs=0.06)


def test_better_skills_never_lose_a_right_answer():
    before = answers("bridge", "Reply with the name alone.")
    after = answers("bridge", "Reply with the name alone. Verify names.")
    assert sum(after) > sum(before)
    assert all(later or not earlier for earlier, later in zip(before, after, strict=True))


def test_advice_in_a_line_of_the_prompt_counts_as_in_the_system_message():
    """And the question keeps its luck."""
    question = make_questions(WORLD, "train", 1, 0, kinds=["bridge"])[0].question.text
    for text in (f"{question}\nLet's think step by step.\nAnswer only.", f"{question} Answer only."):
        messages: list[Message] = [{"role": "user", "content": text}]
        if "step" not in text:
            messages.insert(0, {"role": "system", "content": "Let's think step by step."})
        reply = asyncio.run(ENVIRONMENT.ask(messages))
        assert reply == ENVIRONMENT.reply(f"{question} Answer only.", ["step by step"]).text


def test_conflicting_advice_has_no_effect_and_costs():
    for pair in CONFLICTS:
        both = advised(pair)
        assert both.clear == pytest.approx(0.9 * UNADVISED.clear)
        assert {**vars(both), "clear": 0} == {**vars(UNADVISED), "clear": 0}


def test_too_much_advice_and_long_prompts_weaken_every_gain_but_no_loss():
    few, many = ["steps", "rephrase"], ["steps", "rephrase", "role", "sums", "check"]
    short, long = advised(many, words=60), advised(many, words=61)
    casual = UNADVISED.casual + (1 - UNADVISED.casual) * 0.6 * 0.8
    assert short.casual == pytest.approx(casual + (1 - casual) * 0.1 * 0.8)
    assert long.casual < short.casual and long.hops < short.hops < advised(few).hops + 0.1
    assert advised(["sentences"], words=600).bare == advised(["sentences"]).bare


def test_a_very_long_text_is_read_quickly():
    """The patterns are slow on long texts, which an agent may write."""
    begin = time.perf_counter()
    assert find_advice("check " * 1_000_000) == set()
    assert time.perf_counter() - begin < 2


def test_the_prompts_of_the_exhaustive_search_are_all_combinations_of_advice():
    prompts = list(every_prompt())
    assert len({find_advice(prompt) for prompt in prompts}) == len(prompts) == 2 ** len(ADVICE)
    assert max(len(prompt.split()) for prompt in prompts) <= MOST_WORDS
