"""The methods that ask or play: what they send, what they read, what they count."""

import asyncio
from pathlib import Path

import pytest
import torch

from prompt_r1.agent.names import AgentSpec
from prompt_r1.baselines import Agents, Attempt, Method, make_method
from prompt_r1.baselines.direct import FORMATS
from prompt_r1.baselines.self_consistency import vote
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.metered import FreeSource, MeteredEnvironment
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError, UsageError
from prompt_r1.types import Message, Question
from tests.tiny import ScriptedEnvironment

ANNA = Question("1", "a", "abc def?", ("Anna",))
GAME = TrainConfig(**{**PRESETS["mini"], "max_turns": 3, "max_new": 60, "max_tokens": 900})
PRICE = Price(1.0, 2.0)


class PricedSource:
    """Replies as a function of the messages says, for 10 tokens in and 3 out."""

    parameters: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, reply) -> None:
        self.name = "priced"
        self.reply = reply
        self.asked: list[list[Message]] = []

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        self.asked.append([dict(message) for message in messages])  # type: ignore[misc]
        return Outcome("ok", text=self.reply(messages), tokens_in=10, tokens_out=3)

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


def pool(source) -> Pool:
    budget = Budget()
    member = MeteredEnvironment(source, journal=Journal(None), budget=budget, price=PRICE)
    return Pool([member], budget=budget)


def method(
    name: str, environment: Pool, *, agent: Path | str = "", folder: Path | None = None, **knobs: object
) -> Method:
    known = AgentSpec(agent, GAME, start=str(agent))
    return make_method(
        name,
        environment=environment,
        spec="large",
        open_environment=lambda spec, **_: environment,
        agents=Agents(known, torch.device("cpu")),
        seed=0,
        temperature=1.0,  # seed 0 asks; greedy, the tiny agent never does
        config=EvaluateConfig(**knobs),
        folder=folder,
    )


def answer(name: str, environment: Pool, **options: object) -> Attempt:
    return asyncio.run(method(name, environment, **options).answer(ANNA, sample=0, seed="0"))


def test_the_environment_alone_is_asked_once_and_its_tags_are_read():
    source = PricedSource(lambda _: "I think <answer> Anna </answer>.")
    attempt = answer("direct", pool(source))
    [[message]] = source.asked
    assert message["content"] == f"abc def?\n{FORMATS['tags'].request}"
    assert (attempt.answer, attempt.format, attempt.error) == ("Anna", 1.0, None)
    assert (attempt.calls, attempt.tokens_in, attempt.tokens_out) == (1, 10, 3)
    assert attempt.usd == pytest.approx(16e-6)


def test_the_mini_world_is_asked_for_the_answer_only():
    environment = ScriptedEnvironment(["Anna"])
    attempt = answer("direct", pool(FreeSource(environment, seed=0)), answer_format="only")
    assert environment.asked == [[{"role": "user", "content": "abc def? Answer only."}]]
    assert attempt.answer == "Anna" and attempt.format is None


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
def test_an_answer_is_what_stands_in_the_last_tags_or_the_whole_reply(reply, read):
    assert FORMATS["tags"].read(reply) == read


def test_a_failed_call_is_an_error_and_no_answer():
    attempt = answer("direct", pool(FreeSource(ScriptedEnvironment([EnvError("down")]), seed=0)))
    assert (attempt.answer, attempt.error, attempt.stop, attempt.calls) == (None, "down", "env_error", 1)


def test_the_agent_plays_and_every_call_of_the_game_is_counted(asking_agent):
    attempt = answer("prompt-r1", pool(PricedSource(lambda _: "abc")), agent=asking_agent)
    assert attempt.trajectory is not None
    asked = [turn for turn in attempt.trajectory.turns if turn.reply is not None]
    assert attempt.calls == len(asked) > 0 and attempt.tokens_in == 10 * len(asked)
    assert attempt.turns == len(attempt.trajectory.turns) and "abc" in attempt.raw


def test_the_agent_without_environment_plays_the_same_game_and_asks_nobody(asking_agent):
    source = PricedSource(lambda _: "abc")
    attempt = answer("agent-only", pool(source), agent=asking_agent)
    assert source.asked == [] and attempt.calls == 0 and attempt.usd == 0
    assert "I have nothing to say about this." in attempt.raw


def test_a_method_that_is_none_is_named():
    with pytest.raises(UsageError, match="no method 'magic'"):
        method("magic", pool(PricedSource(str)))


def test_the_chain_of_thought_is_asked_for_on_a_line_of_its_own():
    source = PricedSource(lambda _: "First a, then b: <answer>Anna</answer>")
    attempt = answer("cot", pool(source))
    assert source.asked[0][0]["content"].splitlines()[:2] == ["abc def?", "Let's think step by step."]
    assert attempt.answer == "Anna" and attempt.calls == 1


def test_few_shots_are_training_questions_that_the_environment_itself_got_right():
    train = [Question(str(n), "a", f"Number {n}?", (str(n),)) for n in range(10)]

    def reply(messages: list[Message]) -> str:
        number = messages[-1]["content"].split("?")[0].split()[-1]
        return f"Because. <answer>{number if number in '02468' else 'no idea'}</answer>"

    source = PricedSource(reply)
    few = method("cot-few-shot", pool(source), shots=3)
    asyncio.run(few.prepare(train, []))
    prepared = len(source.asked)
    assert 3 <= few.ledger.task_calls == prepared <= 10
    asyncio.run(few.answer(ANNA, sample=0, seed="s"))
    *examples, last = source.asked[-1]
    assert [message["role"] for message in examples] == ["user", "assistant"] * 3
    assert {message["content"][:8] for message in examples[::2]} <= {f"Number {n}" for n in "02468"}
    assert all(message["content"].startswith("Because.") for message in examples[1::2])
    assert last["content"].startswith("abc def?")


def test_self_consistency_takes_the_most_frequent_answer_and_counts_every_call():
    replies = iter(["Bob", "the Anna", "anna."])
    source = PricedSource(lambda _: f"<answer>{next(replies)}</answer>")
    attempt = answer("self-consistency", pool(source), samples=3)
    assert (attempt.answer, attempt.calls, attempt.tokens_in) == ("the Anna", 3, 30)


def test_self_consistency_goes_on_without_the_calls_that_failed():
    down = EnvError("down")
    environment = pool(FreeSource(ScriptedEnvironment(["Anna", down, down]), seed=0))
    attempt = answer("self-consistency", environment, samples=3)
    assert (attempt.answer, attempt.calls, attempt.error) == ("Anna", 3, None)
    broken = pool(FreeSource(ScriptedEnvironment([down, down, down]), seed=0))
    assert answer("self-consistency", broken, samples=3).error == "down"


def test_free_texts_vote_for_the_one_most_like_the_others():
    assert vote(["a red house", "a green tree", "the red house there"], free_text=True) == 0
    assert vote(["x", "y", "Y"], free_text=False) == 1


def test_self_consistency_samples_as_often_as_the_agent_asks(asking_agent):
    questions = [Question(str(n), "a", "abc def?", ("x",)) for n in range(12)]
    source = PricedSource(lambda _: "abc")
    consistent = method("self-consistency", pool(source), agent=asking_agent)
    asyncio.run(consistent.prepare([], questions))
    assert consistent.ledger.task_calls == len(source.asked) > 0
    assert consistent.samples == max(1, round(len(source.asked) / 12))


def test_without_validation_questions_the_number_of_samples_must_be_given():
    with pytest.raises(UsageError, match="--samples K"):
        asyncio.run(method("self-consistency", pool(PricedSource(str))).prepare([], []))


def test_few_shots_without_training_questions_are_an_error():
    with pytest.raises(UsageError, match="--train-data"):
        asyncio.run(method("cot-few-shot", pool(PricedSource(str))).prepare([], []))
