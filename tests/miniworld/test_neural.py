"""The neural environments: what they read, what they know, and the questions about their world."""

import asyncio
import random

import pytest
import torch
from safetensors.torch import load_file

from prompt_r1.cli.command_line import train_config
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.environment import NEURAL, EnvironmentConfig
from prompt_r1.data.questions import find_questions
from prompt_r1.environments.local import load_local
from prompt_r1.environments.specs import open_for_agent
from prompt_r1.errors import UsageError
from prompt_r1.miniworld import NEURAL_WEIGHTS
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.neural.corpus import (
    ANSWER_ONLY,
    STATEMENTS,
    VOICES,
    exchange,
    statements,
    sum_exchange,
)
from prompt_r1.miniworld.neural.train import Phase, make_environment, recall
from prompt_r1.miniworld.understanding import BeforeYear, Detailed, Lookup, Sum, understand
from prompt_r1.miniworld.world import make_world, neural_world
from prompt_r1.studies import card


@pytest.fixture(scope="module")
def exchanges():
    world, rng = neural_world(), random.Random(0)
    subjects = [*world.names.values()]
    voices = [VOICES[rng.choice("AB")] for _ in range(3000)]
    return [
        sum_exchange(voice, rng) if rng.random() < 0.2 else exchange(rng.choice(subjects), world, voice, rng)
        for voice in voices
    ]


def test_what_a_neural_environment_reads_asks_for_one_step_at_a_time(exchanges):
    world = neural_world()
    requests = [understand(said.prompt.removesuffix(ANSWER_ONLY), world) for said in exchanges]
    understood = [request for request in requests if request is not None]
    assert len(understood) > 900
    assert {type(request) for request in understood} == {Lookup, BeforeYear, Detailed, Sum}


def test_every_reply_that_a_neural_environment_reads_is_right(exchanges):
    """The oracle: the rule-based environment without errors, where it understands the request."""
    oracle = MiniEnvironment(neural_world())
    for said in exchanges:
        truth = oracle.reply(said.prompt.removesuffix(ANSWER_ONLY), card.PERFECT).value
        assert truth in ("", said.value)
        assert card.holds(said.reply, said.value)


def test_the_texts_state_the_facts_of_the_world():
    world = neural_world()
    for subject in [*world.names.values()][:20]:
        text = statements(subject, world, random.Random(0))
        facts = {relation: value for (name, relation), value in world.facts.items() if name == subject}
        for relation, value in facts.items():
            said = [each.format(subject=subject, value=value) for each in STATEMENTS[relation]]
            assert sum(sentence in text for sentence in said) == 1
        assert text.count(".") == len(facts)


def test_a_smaller_world_has_the_names_of_the_whole_one():
    small, whole = make_world(3, films=40, people=32, cities=16), make_world(3)
    assert len(small.train.films) == 30 and len(small.test.films) == 10
    assert {*small.train.films, *small.test.films} < {*whole.train.films, *whole.test.films}
    assert {*small.facts.values()} <= {*small.train.people, *small.test.people} | {
        value for relation in ("year", "genre", "hero", "birthplace") for value in small.values(relation)
    }


def test_the_questions_about_the_neural_world_are_the_same_for_every_seed():
    splits = ("train", "validation", "test", "ood")
    asked = {split: find_questions(["mini-neural"], split, 0) for split in splits}
    assert asked == {split: find_questions(["mini-neural"], split, 7) for split in splits}
    texts = [{question.text for question in questions} for questions in asked.values()]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 1024 + 99 + 198 + 80


@pytest.mark.parametrize("env", ["mini-neural", "mini-neural-b", "mini-neural,mini-neural-b"])
def test_the_questions_follow_the_environment(env):
    config, _ = train_config(["--env", env])
    assert config.data == config.val_data == config.test_data == ("mini-neural",)
    config, _ = train_config(["--env", env, "--val-data", "none"])
    assert config.data == ("mini-neural",) and not config.val_data


@pytest.mark.parametrize(("env", "data"), [("mini-neural", "mini"), ("mini", "mini-neural")])
def test_questions_about_another_world_than_that_of_the_environment_are_refused(env, data):
    with pytest.raises(UsageError, match=f"--env {env} knows another world than --data {data}: give --data"):
        train_config(["--env", env, "--data", data])


def test_a_mute_environment_may_get_the_questions_of_either_world():
    for data in ("mini", "mini-neural"):
        assert train_config(["--env", "mini-mute", "--data", data])[0].data == (data,)


@pytest.mark.parametrize("name", NEURAL)
def test_the_weights_of_a_neural_environment_take_at_most_3_mb_in_bfloat16(name):
    file = NEURAL_WEIGHTS / name / "model.safetensors"
    assert file.stat().st_size <= 3_000_000
    assert {weight.dtype for weight in load_file(file).values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", NEURAL)
def test_a_neural_environment_opens_by_its_name(name):
    pool = open_for_agent(name, AgentConfig(), EnvironmentConfig(), seed=0, device=torch.device("cpu"))
    film, relation = next(key for key in neural_world().facts if key[1] == "director")
    messages = [{"role": "user", "content": f"Who is the {relation} of {film}?"}]
    assert asyncio.run(pool.call(messages, session="question")).text


@pytest.mark.parametrize("name", NEURAL)
def test_a_neural_environment_answers_single_steps_and_not_two_at_once(name):
    source = load_local(name, fields={}, system="not read", seed=0, slots=16, device=torch.device("cpu"))
    assert source.name == name
    world = neural_world()
    bridge = asyncio.run(card.measure(source, list(card.requests_of("bridge", world, 40))))
    assert bridge["step 1"] >= 32 and bridge["step 2"] >= 32 and bridge["as it is"] <= 8
    sums = asyncio.run(card.measure(source, list(card.requests_of("math", world, 40))))
    assert sums["step 1"] >= 32 and sums["as it is"] <= 20


def test_without_its_weights_one_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("prompt_r1.environments.local.NEURAL_WEIGHTS", tmp_path)
    with pytest.raises(UsageError, match="--env mini-neural: this version's weights are not in"):
        load_local("mini-neural", fields={}, system="", seed=0, slots=16, device=torch.device("cpu"))


def test_the_ceiling_is_the_product_of_the_shares_of_the_steps():
    rights = {kind: {"as it is": 1, "step 1": 8} for kind in ("pop", "gen")}
    rights["bridge"] = {"as it is": 0, "step 1": 5, "step 2": 8}
    table = card.card_table({"one": rights}, 10)
    assert "| **bridge, ceiling** | 0.40 |" in table and "| **pop, ceiling** | 0.80 |" in table
    assert "| **mean ceiling** | 0.667 |" in table


def test_the_wordings_of_recorded_games_are_counted_without_names_and_relations(tmp_path):
    world = neural_world()
    film, person = next((key[0], value) for key, value in world.facts.items() if key[1] == "director")
    other = world.train.people[0]
    turns = [
        {"action": {"prompt": f"Who is the director of {film}?"}, "reply": f"It is {person}."},
        {"action": {"prompt": f"Who is the star of {film}?"}, "reply": "It is Nobody."},
        {"action": {"prompt": f"Tell me about {other}."}, "reply": "Hm."},
        {"action": {"prompt": None}, "reply": None},
    ]
    file = tmp_path / "games.jsonl"
    file.write_text(card.json.dumps({"turns": turns}) + "\n")
    table = card.wordings_table([file], world)
    assert "| Who is the RELATION of …? | 0.667 | 0.50 |" in table
    assert "| Tell me about …. | 0.333 | 0.00 |" in table


@pytest.mark.slow
def test_a_small_neural_environment_learns_the_facts_of_a_small_world():
    world = make_world("small", films=16, people=16, cities=8)
    model, reader = make_environment(0, world=world, steps=700, phases=[Phase(1.0, subjects=1.0)])
    found = recall(model, reader, asked=40)
    assert found["fact"] > 0.6, found
