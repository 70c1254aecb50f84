"""Many sessions at once, before an environment that fails."""

import asyncio
import random

import openai
import pytest

from prompt_r1.playing import Limits
from tests.serving.running import pair_of, serving
from tests.support.echo_agent import EchoAgent
from tests.support.mini_server import FaultyServer, with_server
from tests.support.providers import open_environment

SESSIONS, QUESTIONS, MOST_CALLS = 100, 300, 2


@pytest.mark.slow
def test_a_hundred_sessions_get_answers_or_typed_errors_while_one_call_in_ten_fails():
    server = FaultyServer(fail=0.1, faults=["500", "429", "reset", "garbage"], rng=random.Random(0))
    agent = EchoAgent(seconds=0.05)
    texts = [f"{1 + number % 3}: Who is the director of Film {number}?" for number in range(QUESTIONS)]

    async def ask_all() -> list[object]:
        pool = open_environment(f"mini@{server.base_url}", stops_on_failures=False)
        slots = asyncio.Semaphore(SESSIONS)
        with serving(pair_of(agent, pool, limits=Limits(calls=MOST_CALLS), max_sessions=SESSIONS)) as url:
            async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=120) as client:

                async def ask(text: str) -> object:
                    async with slots:
                        try:
                            return await client.chat.completions.create(
                                model="prompt-r1", messages=[{"role": "user", "content": text}]
                            )
                        except openai.InternalServerError as error:
                            return error.body

                return await asyncio.gather(*map(ask, texts))

    outcomes = with_server(ask_all(), server)
    answered = 0
    for text, outcome in zip(texts, outcomes, strict=True):
        if isinstance(outcome, dict):
            assert outcome["type"] == "environment_error"
            continue
        choice, calls = outcome.choices[0], outcome.usage.environment["calls"]
        assert calls == min(MOST_CALLS, int(text[0]))
        assert bool(choice.message.content) == (text[0] != "3")  # the third call is above the limit
        assert "request failed" not in choice.message.content and "html" not in choice.message.content
        answered += 1
    assert answered > 0.95 * QUESTIONS and server.counts["replies"] >= answered
    assert agent.peak > 20
