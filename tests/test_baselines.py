"""The methods that ask or play: what they send, what they read, what they count."""

import asyncio
from pathlib import Path

import pytest
import torch

from prompt_r1.baselines import Agents, Attempt, Method, make_method
from prompt_r1.baselines.direct import FORMATS
from prompt_r1.config import PRESETS, EvaluateConfig, TrainConfig
from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.metered import FreeSource, MeteredEnvironment
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.retry import Outcome
from prompt_r1.players import KnownAgent
from prompt_r1.types import EnvError, Message, Question, UsageError
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


def method(name: str, environment: Pool, *, agent: Path | str = "", **knobs: object) -> Method:
    known = KnownAgent(agent, GAME, start=str(agent))
    return make_method(
        name,
        environment=environment,
        spec="large",
        open_environment=lambda spec, fields=None: environment,
        agents=Agents(known, torch.device("cpu")),
        temperature=1.0,  # seed 0 asks; greedy, the tiny agent never does
        config=EvaluateConfig(**knobs),
        folder=None,
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
