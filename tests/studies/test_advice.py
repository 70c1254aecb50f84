"""The environment that reads instructions, and the script that writes them."""

import asyncio
import random
from statistics import mean

import pytest

from prompt_r1.environments.asking import IN_TAGS
from prompt_r1.environments.sources import Caller
from prompt_r1.f1 import exact_match
from prompt_r1.miniworld.environment import ANSWER_ONLY, MiniEnvironment
from prompt_r1.miniworld.questions import make_questions
from prompt_r1.miniworld.world import make_world
from prompt_r1.types import Message
from studies.advice import ADVICE, MARKS, AdvisedEnvironment, MiniOptimizer, write_prompt

WORLD = make_world(0)
ENVIRONMENT = AdvisedEnvironment(seed=0)


def reply(prompt: str, instruction: str = "") -> str:
    """The reply to a prompt after a system message."""
    messages: list[Message] = [
        {"role": "system", "content": instruction},
        {"role": "user", "content": prompt},
    ]
    return asyncio.run(ENVIRONMENT.ask(messages))


def answers(kind: str, instruction: str = "", count: int = 400) -> list[bool]:
    """Whether the bare replies to questions of a kind are right."""
    return [
        exact_match(reply(f"{question.text} Answer only.", instruction), question.answers) == 1
        for _, question in make_questions(WORLD, "train", count, kinds=[kind])
    ]


def test_without_advice_it_replies_as_the_mini_environment_does():
    mini = MiniEnvironment(seed=0)
    prompts = [question.text for _, question in make_questions(WORLD, "train", 200)]
    prompts += ["Tell me about nothing.", "", "Who is the\ndirector of X?"]
    assert [reply(prompt) for prompt in prompts] == [mini.reply(prompt).text for prompt in prompts]


@pytest.mark.parametrize(
    ("kind", "advice", "share"),
    [
        ("bridge", "", 0.15 * 0.7),
        ("bridge", "Reply with the name alone.", 0.15 * 0.97),
        ("bridge", "Work STEP BY\nSTEP. Reply with the name alone.", (0.15 + 0.85 * 0.5) * 0.949),
        ("bridge", "Be quick.", 0.15 * 0.5 * 0.85),
        ("bridge", "Step by step. Be quick. Reply with the name alone.", (0.075 + 0.925 * 0.5) * 0.974),
        ("compare", "Look up both years. Reply with the name alone.", (0.3 + 0.7 * 0.6) * 0.97),
        ("pop", "Rephrase casual questions. Reply with the name alone.", (0.25 + 0.75 * 0.6) * 0.97),
        ("gen", "Give all details.", 0.8 * 0.7),
    ],
)
def test_the_share_of_right_answers_is_the_skill_that_the_advice_gives(kind, advice, share):
    assert mean(answers(kind, advice)) == pytest.approx(share, abs=0.06)


def test_better_skills_never_lose_a_right_answer():
    before = answers("bridge", "Reply with the name alone.")
    after = answers("bridge", "Reply with the name alone. Double-check every name.")
    assert sum(after) > sum(before)
    assert all(later or not earlier for earlier, later in zip(before, after, strict=True))


def test_advice_is_read_in_system_messages_and_in_the_prompt():
    for _, question in make_questions(WORLD, "train", 50, kinds=["math"]):
        prompt = f"{question.text} Let's think step by step."
        assert reply(prompt, "Be kind.") == reply(prompt)
    inside = answers("math", count=200)
    assert sum(answers("math", "step by step", count=200)) > sum(inside)
    text = make_questions(WORLD, "train", 1, kinds=["bridge"])[0][1].text
    assert ENVIRONMENT.reply(f"{text}\nLet's think step by step.").value != ""


@pytest.mark.parametrize(("opening", "closing"), MARKS)
def test_the_optimizer_writes_a_prompt_between_the_marks_that_the_request_names(opening, closing):
    request = f"An instruction:\n{opening}Be quick.{closing}\nWrite a better one."

    def write(sample: int) -> str:
        messages: list[Message] = [{"role": "user", "content": request}]
        return asyncio.run(MiniOptimizer().ask(messages, Caller(sample=sample)))

    written = [write(sample) for sample in range(20)]
    assert written == [write(sample) for sample in range(20)] and len(set(written)) > 5
    assert all(text.startswith(opening) and text.endswith(closing) for text in written)


def test_a_new_prompt_keeps_most_of_the_old_advice_and_has_one_or_two_pieces_more():
    prompts = [write_prompt("give all details. be quick.", random.Random(seed)) for seed in range(200)]
    assert 0.65 < mean("Be quick." in prompt for prompt in prompts) < 0.85
    assert {prompt.count(".") for prompt in prompts} == {1, 2, 3, 4}
    assert all(sentence.strip().lower() in ADVICE for one in prompts for sentence in one.split(".")[:-1])


def test_the_tags_that_evaluations_ask_for_are_read_as_a_request_for_the_answer_only():
    """`evaluate.py` asks an environment that a user names for tags, which these rules cannot write."""
    for _, question in make_questions(WORLD, "train", 100):
        assert reply(question.text + IN_TAGS) == reply(question.text + ANSWER_ONLY)
