"""The script that writes prompts: it reads the requests of each search, and finds what went wrong."""

import asyncio
import hashlib
import random

import pytest

from prompt_r1.baselines.gepa import reflection
from prompt_r1.baselines.opro import meta_prompt
from prompt_r1.baselines.textgrad import conversation, criticise_prompt, criticise_reply
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.miniworld import make_questions, make_world
from prompt_r1.miniworld.advice import find_advice
from prompt_r1.miniworld.mini_optimizer import ANYTHING, CAUSES, FORM, MiniOptimizer, _rewrite
from prompt_r1.types import Question

OLD = "Stay calm. Use logic."
QUESTIONS = {one.question.dataset: one.question for one in make_questions(make_world(0), "train", 60, 0)}
ADVICE_FOR = dict(zip(("bridge", "compare", "pop", "math", "gen"), CAUSES, strict=True))


def write(request: str, sample: int = 0) -> str:
    messages = [{"role": "user", "content": request}]
    return asyncio.run(MiniOptimizer(seed=0).call(messages, sample=sample)).text


def share_about(cause, request: str) -> float:
    """The share of the new prompts with advice about a cause."""
    written = [write(request, sample) for sample in range(100)]
    return sum(any(sentence in text for sentence in cause.advice) for text in written) / 100


def failed(question: Question, reply: str = "nobody") -> Prediction:
    return Prediction(question, reply, reply)


@pytest.mark.parametrize("kind", ADVICE_FOR)
def test_it_gives_advice_about_the_failures_in_a_reflection_of_gepa(kind):
    right = failed(QUESTIONS["math" if kind != "math" else "gen"])
    right = Prediction(right.question, right.question.answers[0], right.question.answers[0])
    request = reflection(OLD, [right, failed(QUESTIONS[kind])])
    assert share_about(ADVICE_FOR[kind], request) > 0.6
    assert any(write(request, sample).startswith("```\nStay calm. Use logic. ") for sample in range(9))


@pytest.mark.parametrize("kind", ADVICE_FOR)
def test_it_names_the_cause_in_both_criticisms_of_textgrad_and_then_gives_advice(kind):
    of_reply = write(criticise_reply(failed(QUESTIONS[kind])))
    of_prompt = write(criticise_prompt(OLD, failed(QUESTIONS[kind]), of_reply))
    cause = ADVICE_FOR[kind]
    assert cause.criticism in of_reply and cause.criticism in of_prompt
    rewrite = f"{conversation(OLD, failed(QUESTIONS[kind]))}\n<FEEDBACK>{of_prompt}</FEEDBACK>\n"
    assert share_about(cause, rewrite + "<IMPROVED_VARIABLE>") > 0.6


@pytest.mark.parametrize("kind", ADVICE_FOR)
def test_it_gives_advice_about_the_problems_that_opro_shows(kind):
    scores = {"Bad.": 0.1, "Fine.": 0.5, "Better.": 0.6, "Best.": 0.7}
    request = meta_prompt(scores, [QUESTIONS[kind]])
    assert share_about(ADVICE_FOR[kind], request) > 0.6
    written = " ".join(write(request, sample) for sample in range(50))
    assert "Best." in written and "Fine." in written and "Bad." not in written, "one of the best three"


def test_a_right_answer_in_a_sentence_is_a_matter_of_form():
    question = QUESTIONS["bridge"]
    assert FORM.criticism in write(criticise_reply(failed(question, f"It is {question.answers[0]}.")))
    assert write(criticise_reply(failed(question, question.answers[0]))) == "It is perfect."


def test_some_of_its_advice_harms_and_some_is_not_understood():
    understood = [find_advice(sentence) for sentence in ANYTHING]
    assert {"quick", "sentences", "doubt", "fantasy"} <= set().union(*understood)
    assert understood.count(frozenset()) == 2


def test_a_new_prompt_has_one_or_two_pieces_of_advice_more():
    prompts = [_rewrite("<VARIABLE></VARIABLE>", random.Random(seed)) for seed in range(60)]
    one, two = set(ANYTHING), {f"{first} {second}" for first in ANYTHING for second in ANYTHING}
    assert set(prompts) <= one | two
    assert sum(prompt in one for prompt in prompts) > sum(prompt in two for prompt in prompts) > 5


def test_it_counts_tokens():
    outcome = asyncio.run(MiniOptimizer(seed=0).call([{"role": "user", "content": "x" * 400}]))
    assert outcome.tokens_in == 100 and outcome.tokens_out == 4


def test_the_searches_of_seed_0_get_the_prompts_of_the_published_comparison():
    """The published numbers hold for these prompts: measure them again if one is meant to change."""
    problems = [QUESTIONS[kind] for kind in ADVICE_FOR]
    requests = [reflection(OLD, [failed(problem) for problem in problems])]
    requests.append(meta_prompt({"Fine. So. It. Is. Here.": 0.5, "Best.": 0.7}, problems))
    written = [write(request, sample) for request in requests for sample in range(60)]
    assert hashlib.sha256("\n".join(written).encode()).hexdigest()[:16] == "bc6d9103e327a8f9"
