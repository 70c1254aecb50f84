"""The neural environments and the agent of parts: what they read, and what they know."""

import asyncio
import json
import random
import re
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from prompt_r1.data.questions import find_questions
from prompt_r1.metrics.em_f1 import exact_match
from prompt_r1.miniworld.agent import demonstrations
from prompt_r1.miniworld.demonstrations import decompose
from prompt_r1.miniworld.environment import (
    BeforeYear,
    Detailed,
    Lookup,
    MiniEnvironment,
    Skills,
    Sum,
    understand,
)
from prompt_r1.miniworld.world import TRAINING_MIX, make_questions, make_world
from studies.neural import (
    ANSWER_ONLY,
    SIZES,
    WEIGHTS,
    Exchange,
    Phase,
    Reader,
    exchange,
    make_environment,
    neural_questions,
    neural_world,
    sum_exchange,
    write_questions,
)
from studies.parts import show_part
from tests.support.providers import open_environment

# The rule-based environment with these skills knows the right value of every request that it understands.
PERFECT = Skills(clear=1, sum=1, hops=1, casual=1, compare=1, problem=1, details=1)
WORLD = neural_world()
ORACLE = MiniEnvironment(WORLD)


@pytest.fixture(scope="module")
def exchanges() -> list[Exchange]:
    rng = random.Random(0)
    subjects = [*WORLD.names.values()]
    voices = [rng.choice("AB") for _ in range(1000)]
    return [
        sum_exchange(voice, rng) if rng.random() < 0.2 else exchange(rng.choice(subjects), WORLD, voice, rng)
        for voice in voices
    ]


def test_what_a_neural_environment_reads_asks_for_one_step_and_has_the_right_reply(exchanges):
    """The oracle: the rule-based environment without errors, where it understands the request."""
    understood = set()
    for prompt, reply in exchanges:
        question = prompt.removesuffix(ANSWER_ONLY)
        understood.add(type(understand(question, WORLD)))
        assert ORACLE.reply(question, PERFECT).value in reply.lower() + reply
    assert understood == {Lookup, BeforeYear, Detailed, Sum, type(None)}


def test_the_files_of_questions_hold_the_questions_about_the_neural_world(tmp_path):
    write_questions(tmp_path)
    read = {split: find_questions([str(tmp_path / f"{split}.jsonl")], "", 0) for split in SIZES}
    assert read == {split: neural_questions(split) for split in SIZES}
    texts = [{question.text for question in questions} for questions in read.values()]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 1024 + 99 + 198 + 80


@pytest.mark.parametrize("name", ["mini-neural", "mini-neural-b"])
def test_a_neural_environment_answers_single_steps_and_not_two_at_once(name):
    weights = load_file(WEIGHTS / name / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    environment = open_environment(f"hf:{WEIGHTS / name}", env_system="")

    def share_right(prompts: list[str], values: list[str]) -> float:
        async def ask_all() -> list[str]:
            asked = [environment.ask([{"role": "user", "content": prompt}]) for prompt in prompts]
            return await asyncio.gather(*asked)

        replies = asyncio.run(ask_all())
        found = [
            re.search(rf"\b{re.escape(value)}\b", reply) for value, reply in zip(values, replies, strict=True)
        ]
        return sum(match is not None for match in found) / len(prompts)

    for kind, limit in {"bridge": 0.2, "math": 0.5}.items():
        minis = make_questions(WORLD, "train", 10, 0, kinds=[kind])
        first, second = zip(*(decompose(mini.slots) for mini in minis), strict=True)
        middle = [ORACLE.reply(step.prompt, PERFECT).value for step in first]
        then = [step.prompt.format(value=value) for step, value in zip(second, middle, strict=True)]
        answers = [mini.question.answers[0] for mini in minis]
        assert share_right([step.prompt for step in first], middle) >= 0.8
        assert share_right(then, answers) >= 0.8
        assert share_right([mini.question.text for mini in minis], answers) <= limit


def test_an_environment_is_trained_on_the_rows_of_its_reader():
    reader = Reader(make_world("small", films=16, people=16, cities=8), "A", 0)
    model = make_environment(reader, 0, feed_forward=64, steps=2, phases=[Phase(1.0, subjects=1.0)])
    assert not model.training and model.config.vocab_size == len(reader.tokenizer)


def test_no_demonstration_of_the_agent_of_parts_chains_two_facts():
    """No request holds what only a reply has told; questions of two steps get a single request."""
    asked: Counter[str] = Counter()
    answered, right = 0, 0
    for question, turns in demonstrations(0, worlds=2, games=600, show=show_part):
        told: set[str] = set()
        for turn in turns:
            used = set(re.findall(r"\d+|[A-Z]\w+ [A-Z]\w+", turn.action.prompt or ""))
            assert not used & told, (question.text, turns)
            words = re.findall(r"\d+|[A-Z]\w+ [A-Z]\w+", turn.reply or "")
            told |= {word for word in words if word not in question.text}
            asked[question.dataset] += turn.action.prompt is not None
        if question.dataset == "parts":
            answered += turns[-1].action.answer is not None
            right += exact_match(turns[-1].action.answer or "", question.answers) == 1
        else:
            assert sum(turn.action.prompt is not None for turn in turns) <= 1
    assert set(asked) == {"parts", *TRAINING_MIX} and right > 0.95 * answered


def test_the_corpus_is_that_of_the_weights_in_the_repository():
    """The tokenizer is trained on it, so the stored vocabularies pin its sentences and their order."""
    for name, voice, seed in (("mini-neural", "A", 0), ("mini-neural-b", "B", 1)):
        stored = json.loads((WEIGHTS / name / "tokenizer.json").read_text("utf-8"))
        assert Reader(WORLD, voice, seed).tokenizer.get_vocab().items() >= stored["model"]["vocab"].items()
