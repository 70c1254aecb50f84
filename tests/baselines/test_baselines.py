"""The methods that ask or play: what they send, what they read, what they count."""

import asyncio

import pytest

from prompt_r1.baselines.ask_once import FORMATS
from prompt_r1.baselines.games import AgentMethod
from prompt_r1.baselines.self_consistency import vote
from prompt_r1.environments.sources import FreeSource
from prompt_r1.errors import EnvError, UsageError
from prompt_r1.metrics.em_f1 import exact_match
from prompt_r1.miniworld import MiniEnvironment, make_world
from prompt_r1.miniworld.advice import AdvisedEnvironment
from prompt_r1.playing import GREEDY
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.reward import RULES
from prompt_r1.types import GameSettings, Message, Question
from tests.support import tiny
from tests.support.methods import ANNA, PricedSource, answer, method, pool
from tests.support.tiny import ScriptedAgent, ScriptedEnvironment, think


def test_direct_makes_one_call_and_reads_the_answer_in_tags():
    source = PricedSource(lambda _: "I think <answer> Anna </answer>.")
    prediction = answer("direct", pool(source))
    [[message]] = source.asked
    assert message["content"] == f"abc def?\n{FORMATS['tags'].request}"
    assert (prediction.answer, prediction.format, prediction.error) == ("Anna", 1.0, "")
    assert (prediction.spent.calls, prediction.spent.tokens_in, prediction.spent.tokens_out) == (1, 10, 3)
    assert prediction.spent.usd == pytest.approx(16e-6)


def test_without_tags_the_request_is_answer_only():
    environment = ScriptedEnvironment(["Anna"])
    prediction = answer("direct", pool(FreeSource(environment, seed=0)), answer_format="only")
    assert environment.asked == [[{"role": "user", "content": "abc def? Answer only."}]]
    assert prediction.answer == "Anna" and prediction.format is None


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ("Anna", ("Anna", 0.0)),
        ("<answer>Bob</answer> no: <answer>Anna</answer>", ("Anna", 1.0)),
        ("<answer><answer>Anna</answer>", ("Anna", 1.0)),
        ("</answer> Anna <answer>", ("</answer> Anna <answer>", 0.0)),
        ("<answer></answer>", ("", 1.0)),
        ("<answer>" * 50_000, ("<answer>" * 50_000, 0.0)),
    ],
)
def test_the_answer_is_the_content_of_the_last_tags_or_the_whole_reply(reply, read):
    assert FORMATS["tags"].read(reply) == read


def test_a_failed_call_gives_an_error_instead_of_an_answer():
    prediction = answer("direct", pool(FreeSource(ScriptedEnvironment([EnvError("down")]), seed=0)))
    assert (prediction.answer, prediction.error) == (None, "down")
    assert (prediction.stop, prediction.spent.calls) == ("env_error", 1)
    assert prediction.turns == 1, "a method without an agent has one turn"


def test_the_agent_plays_a_game_and_every_call_of_it_is_counted(asking_agent):
    source = PricedSource(lambda _: "abc")
    prediction = answer("prompt-r1", pool(source), agent=asking_agent)
    calls = len(source.asked)
    assert prediction.spent.calls == calls > 0 and prediction.spent.tokens_in == 10 * calls
    assert prediction.turns in (calls, calls + 1) and prediction.raw.count("abc") >= calls


class OneTurnAgent(ScriptedAgent):
    """Answers at once."""

    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["answer"])
    game = GameSettings(max_turns=1)


@pytest.mark.parametrize(("rule", "reward"), [("alone", 1.0), ("release", -0.4)])
def test_a_game_is_rewarded_by_the_rule_of_the_method(rule, reward):
    """A perfect turn without an interaction opens the gate of "alone", but not that of "release"."""
    agent = OneTurnAgent([think("so", answer="Anna")])
    played = AgentMethod(lambda: agent, None, RULES[rule], GREEDY)
    prediction = asyncio.run(played.answer(ANNA, sample=0, seed="0"))
    assert prediction.reward == pytest.approx(reward) and prediction.format == 1.0


def test_a_broken_game_has_an_error_and_neither_reward_nor_format(asking_agent):
    environment = pool(FreeSource(ScriptedEnvironment([EnvError("down")]), seed=0))
    prediction = answer("prompt-r1", environment, agent=asking_agent)
    assert (prediction.stop, prediction.error, prediction.spent.calls) == ("env_error", "down", 1)
    assert prediction.reward is None and prediction.format is None


def test_agent_only_plays_the_same_game_without_calling_the_environment(asking_agent):
    source = PricedSource(lambda _: "abc")
    prediction = answer("agent-only", pool(source), agent=asking_agent)
    assert source.asked == [] and prediction.spent.calls == 0 and prediction.spent.usd == 0
    assert "I have nothing to say about this." in prediction.raw


def test_a_chain_of_thought_is_asked_for_and_then_for_the_answer_that_it_leads_to():
    """Kojima et al. 2022: first the reasoning, without a format, then the answer."""
    replies = iter(["First a, then b.", "<answer>Anna</answer>"])
    source = PricedSource(lambda _: next(replies))
    prediction = answer("cot", pool(source))
    [first], [*before, last] = source.asked
    assert first == {"role": "user", "content": "abc def?\nLet's think step by step."}
    assert before == [first, {"role": "assistant", "content": "First a, then b."}]
    assert last["content"].startswith("Therefore, the answer is\n") and "<answer>" in last["content"]
    assert prediction.answer == "Anna" and prediction.spent.calls == 2


def test_the_mini_world_extracts_the_answer_from_its_own_chain_of_thought():
    world = make_world(0)
    right = 0
    for environment in (MiniEnvironment(world, seed=0), AdvisedEnvironment(world, seed=0)):
        for film in world.test.films[:20]:
            question = Question("q", "a", f"Who is the director of {film}?", (world.facts[film, "director"],))
            cot = method("cot", pool(FreeSource(environment, seed=0)), answer_format="only")
            found = asyncio.run(cot.answer(question, sample=0, seed="0"))
            right += exact_match(found.answer, question.answers)
    assert right >= 36, "clear questions are nearly always answered right"


def test_few_shot_examples_are_training_questions_that_the_environment_answered_correctly():
    train = [Question(str(n), "a", f"Number {n}?", (str(n),)) for n in range(10)]

    def reply(messages: list[Message]) -> str:
        number = messages[-1]["content"].split("?")[0].split()[-1]
        return f"Because. <answer>{number if number in '02468' else 'no idea'}</answer>"

    source = PricedSource(reply)
    few = method("cot-few-shot", pool(source), shots=3)
    asyncio.run(few.prepare(train, []))
    prepared = len(source.asked)
    assert 3 <= few.ledger.task.calls == prepared <= 10
    assert not any(source.samples), "a repeated preparation finds its calls in the journal"
    asyncio.run(few.answer(ANNA, sample=0, seed="s"))
    *examples, last = source.asked[-1]
    assert [message["role"] for message in examples] == ["user", "assistant"] * 3
    assert {message["content"][:8] for message in examples[::2]} <= {f"Number {n}" for n in "02468"}
    assert all(message["content"].startswith("Because.") for message in examples[1::2])
    assert last["content"].startswith("abc def?")


def test_self_consistency_takes_the_most_frequent_answer_and_counts_every_call():
    replies = iter(["Bob", "the Anna", "anna."])
    source = PricedSource(lambda _: f"<answer>{next(replies)}</answer>")
    prediction = answer("self-consistency", pool(source), samples=3)
    assert (prediction.answer, prediction.spent.calls, prediction.spent.tokens_in) == ("the Anna", 3, 30)


def test_repeats_of_self_consistency_have_samples_of_their_own():
    """With shared samples, which a journal replies to once, the repeats would differ less than they do."""
    source = PricedSource(str)
    consistent = method("self-consistency", pool(source), samples=3)
    for repeat in range(2):
        asyncio.run(consistent.answer(ANNA, sample=repeat, seed="0"))
    assert len(source.samples) == len(set(source.samples)) == 6


def test_self_consistency_ignores_failed_calls_unless_all_fail():
    down = EnvError("down")
    environment = pool(FreeSource(ScriptedEnvironment(["Anna", down, down]), seed=0))
    prediction = answer("self-consistency", environment, samples=3)
    assert (prediction.answer, prediction.spent.calls, prediction.error) == ("Anna", 3, "")
    broken = pool(FreeSource(ScriptedEnvironment([down, down, down]), seed=0))
    assert answer("self-consistency", broken, samples=3).error == "down"


def test_the_vote_on_free_texts_goes_to_the_one_most_similar_to_the_others():
    assert vote(["a red house", "a green tree", "the red house there"], free_text=True) == 0
    assert vote(["x", "y", "Y"], free_text=False) == 1


def test_self_consistency_makes_as_many_calls_as_the_agent_on_average(asking_agent):
    questions = [Question(str(n), "a", "abc def?", ("x",)) for n in range(12)]
    source = PricedSource(lambda _: "abc")
    consistent = method("self-consistency", pool(source), agent=asking_agent)
    asyncio.run(consistent.prepare([], questions))
    assert consistent.ledger.task.calls == len(source.asked) > 0
    assert consistent.samples == max(1, round(len(source.asked) / 12))


@pytest.mark.parametrize(
    ("name", "flag"), [("self-consistency", "--samples K"), ("cot-few-shot", "--train-data")]
)
def test_a_method_without_the_questions_that_it_needs_names_the_flag(name, flag):
    with pytest.raises(UsageError, match=flag):
        asyncio.run(method(name, pool(PricedSource(str))).prepare([], []))
