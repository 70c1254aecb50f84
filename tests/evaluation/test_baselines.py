"""The methods that ask or play: what they send, what they read, what they count."""

import asyncio
from dataclasses import replace

import pytest

from prompt_r1.environments.asking import IN_TAGS, read_answer, request_of
from prompt_r1.environments.own import MuteEnvironment, OwnSource
from prompt_r1.errors import EnvError, UsageError
from prompt_r1.evaluation.making import answer_by_games
from prompt_r1.evaluation.predictions import System
from prompt_r1.f1 import exact_match
from prompt_r1.miniworld.environment import ANSWER_ONLY, MiniEnvironment
from prompt_r1.miniworld.world import make_world
from prompt_r1.pair.agent import Sampling
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.protocol import NO_REPLY, Codec
from prompt_r1.reward import RULE_WITHOUT_ENVIRONMENT, RULES
from prompt_r1.settings.agent import INSTRUCTIONS
from prompt_r1.types import GameSettings, Question
from studies.advice import AdvisedEnvironment
from tests.support import tiny
from tests.support.echo_agent import EchoAgent, Shouting
from tests.support.methods import ANNA, CONFIG, PricedSource, answer, method, priced
from tests.support.providers import environment_of
from tests.support.tiny import ScriptedAgent, ScriptedEnvironment, think


def test_direct_makes_one_call_and_reads_the_answer_in_tags():
    source = PricedSource(lambda _: "I think <answer> Anna </answer>.")
    prediction = answer("direct", priced(source))
    [[message]] = source.asked
    assert message["content"] == f"abc def?{IN_TAGS}"
    assert (prediction.answer, prediction.format, prediction.error) == ("Anna", 1.0, "")
    assert (prediction.spent.calls, prediction.spent.tokens_in, prediction.spent.tokens_out) == (1, 10, 3)
    assert prediction.spent.usd == pytest.approx(16e-6)


def test_without_tags_the_request_is_answer_only():
    environment = ScriptedEnvironment(["Anna"])
    prediction = answer("direct", priced(OwnSource(environment, seed=0, name="mini")))
    assert environment.asked == [[{"role": "user", "content": "abc def? Answer only."}]]
    assert prediction.answer == "Anna" and prediction.format is None


def test_a_real_model_beside_the_mini_world_is_asked_as_real_models_are():
    """It got "Answer only.", and its whole reply counted as the answer."""
    assert request_of("mini,mini-b") == ANSWER_ONLY
    assert request_of("mini,gpt-4o-mini") == IN_TAGS


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ("Anna", ("Anna", 0.0)),
        ("<answer>Bob</answer> no: <answer>Anna</answer>", ("Anna", 1.0)),
        ("<answer><answer>Anna</answer>", ("Anna", 1.0)),
        ("<answer>Anna</answer></answer>", ("Anna", 1.0)),
        ("</answer> Anna <answer>", ("</answer> Anna <answer>", 0.0)),
        ("<answer></answer>", ("", 1.0)),
        ("<answer>" * 50_000, ("<answer>" * 50_000, 0.0)),
    ],
)
def test_the_answer_is_the_content_of_the_last_tags_or_the_whole_reply(reply, read):
    assert read_answer(reply, IN_TAGS) == read


def test_cot_sends_no_empty_message_though_the_reasoning_has_no_text():
    """A thinking model used up max_tokens. The second call had an empty message, which servers refuse."""
    source = PricedSource(lambda messages: "" if len(messages) == 1 else "<answer>Anna</answer>")
    prediction = answer("cot", priced(source))
    question, thought, request = source.asked[1]
    for message in (question, thought, request):
        assert message["content"].strip()
    assert thought["content"] == NO_REPLY and prediction.answer == "Anna"


def test_a_failed_call_gives_an_error_instead_of_an_answer():
    prediction = answer("direct", priced(OwnSource(ScriptedEnvironment([EnvError("down")]), seed=0)))
    assert (prediction.answer, prediction.error) == (None, "down")
    assert (prediction.stop, prediction.spent.calls) == ("env_error", 1)
    assert prediction.turns is None, "a method without an agent plays no game"


def test_the_agent_plays_a_game_and_every_call_of_it_is_counted(asking_agent):
    source = PricedSource(lambda _: "abc")
    prediction = answer("prompt-r1", priced(source), agent=asking_agent)
    calls = len(source.asked)
    assert prediction.spent.calls == calls > 0 and prediction.spent.tokens_in == 10 * calls
    assert prediction.turns in (calls, calls + 1) and prediction.raw.count("abc") >= calls


class OneTurnAgent(ScriptedAgent):
    """Answers at once."""

    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["answer"])
    game = GameSettings(max_turns=1)


@pytest.mark.parametrize(("rule", "reward"), [(RULE_WITHOUT_ENVIRONMENT, 1.0), (RULES["release"], -0.4)])
def test_a_game_is_rewarded_by_the_rule_of_the_method(rule, reward):
    """A perfect turn without an interaction opens the gate of an agent alone, but not of "release"."""
    agent = OneTurnAgent([think("so", answer="Anna")])
    played = answer_by_games(
        agent, environment_of(MuteEnvironment()), System("grpo-only"), rule, Sampling("evaluation/0")
    )
    prediction = asyncio.run(played(ANNA, 0))
    assert prediction.reward == pytest.approx(reward) and prediction.format == 1.0


@pytest.mark.parametrize(("name", "formatted"), [("sft", 1.0), ("grpo-only", 0.0)])
def test_only_the_agent_of_sft_may_answer_without_thinking(name, formatted):
    """Its instruction asks for think blocks, but its gold answers have none."""
    agent = OneTurnAgent(["<answer>Anna</answer>"])
    rule, sampling = RULE_WITHOUT_ENVIRONMENT, Sampling("evaluation/0")
    played = answer_by_games(agent, environment_of(MuteEnvironment()), System(name), rule, sampling)
    prediction = asyncio.run(played(ANNA, 0))
    assert (prediction.answer, prediction.format) == ("Anna", formatted)


def test_a_broken_game_has_an_error_and_neither_reward_nor_format(asking_agent):
    environment = priced(OwnSource(ScriptedEnvironment([EnvError("down")]), seed=0))
    prediction = answer("prompt-r1", environment, agent=asking_agent)
    assert (prediction.stop, prediction.error, prediction.spent.calls) == ("env_error", "down", 1)
    assert prediction.reward is None and prediction.format is None


def test_untrained_is_the_agent_that_the_training_started_from_whatever_the_evaluations_seed(
    asking_agent, monkeypatch
):
    """The mini agent of another seed is another agent. The evaluation's seed is 0 here."""
    starts = {("mini", 3): asking_agent}
    monkeypatch.setattr(NamedAgent, "make", lambda agent, seed: starts[agent.name, seed])
    trained = NamedAgent("trained", replace(CONFIG, seed=3), start="mini")
    assert answer("untrained", priced(PricedSource(lambda _: "abc")), agent=trained).turns > 0


def test_grpo_only_plays_the_agent_that_was_trained_alone(asking_agent):
    source = PricedSource(lambda _: "abc")
    alone = NamedAgent("alone", CONFIG, start="", folder=asking_agent)
    assert answer("grpo-only", priced(source), agent=alone).turns > 0
    assert source.asked == []


@pytest.mark.parametrize("name", ["sft", "bc", "rft"])
def test_fine_tuning_begins_with_the_agent_that_the_training_started_from(name, monkeypatch, tmp_path):
    def stop(agent: NamedAgent, seed: int) -> None:
        raise UsageError(f"{agent.name} {seed}")

    monkeypatch.setattr(NamedAgent, "make", stop)
    trained = NamedAgent("trained", replace(CONFIG, seed=3), start="mini")
    with pytest.raises(UsageError, match=r"^mini 3$"):
        method(name, priced(PricedSource(str)), agent=trained, folder=tmp_path, seed=5)


def test_the_games_of_a_repeated_question_differ(asking_agent):
    play = method("prompt-r1", priced(PricedSource(lambda _: "abc")), agent=asking_agent)
    first, again, second = (asyncio.run(play(ANNA, sample)).raw for sample in (0, 0, 1))
    assert first == again != second


def test_agent_only_plays_the_same_game_without_calling_the_environment(asking_agent):
    source = PricedSource(lambda _: "abc")
    prediction = answer("agent-only", priced(source), agent=asking_agent)
    assert source.asked == [] and prediction.spent.calls == 0 and prediction.spent.usd == 0
    assert "I have nothing to say about this." in prediction.raw


@pytest.mark.parametrize(
    ("name", "reply", "asked"), [("large", "<answer>Anna</answer>", IN_TAGS), ("mini", "Anna", ANSWER_ONLY)]
)
def test_a_chain_of_thought_is_asked_for_and_then_for_the_answer_that_it_leads_to(name, reply, asked):
    """Kojima et al. 2022: first the reasoning, without a format, then the answer."""
    replies = iter(["First a, then b.", reply])
    source = PricedSource(lambda _: next(replies))
    source.name = name
    prediction = answer("cot", priced(source))
    [first], [*before, last] = source.asked
    assert first == {"role": "user", "content": "abc def?\nLet's think step by step."}
    assert before == [first, {"role": "assistant", "content": "First a, then b."}]
    assert last["content"] == f"Therefore, the answer is …\n{asked.strip()}"
    assert prediction.answer == "Anna" and prediction.spent.calls == 2


def test_the_mini_world_extracts_the_answer_from_its_own_chain_of_thought():
    world = make_world(0)
    right = 0
    for environment in (MiniEnvironment(seed=0), AdvisedEnvironment(seed=0)):
        for film in world.test.films[:20]:
            question = Question("q", "a", f"Who is the director of {film}?", (world.facts[film, "director"],))
            cot = method("cot", priced(OwnSource(environment, seed=0, name="mini")))
            found = asyncio.run(cot(question, 0))
            right += exact_match(found.answer, question.answers)
    assert right >= 36, "clear questions are nearly always answered right"


def test_games_are_sampled_with_the_temperature_and_top_p_of_the_evaluation(monkeypatch):
    agent = EchoAgent()
    monkeypatch.setattr("prompt_r1.evaluation.making.load_agent", lambda *arguments: agent)
    play = method("prompt-r1", environment_of(Shouting()), agent="echo", temperature=0.5, top_p=0.9)
    asyncio.run(play(ANNA, 0))
    assert {sampled_with[1:] for sampled_with in agent.sampled_with} == {(0.5, 0.9)}
