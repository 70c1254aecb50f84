"""Limits of one question, over all that is done for it."""

import asyncio

import pytest

from prompt_r1.environments.environment import environment_of
from prompt_r1.playing import LimitReached, Limits, play_within
from prompt_r1.types import Question
from tests.support.echo_agent import EchoAgent


class SlowReplies:
    async def ask(self, messages):
        await asyncio.sleep(0.2)
        return "fine"


def test_all_calls_of_a_question_share_its_seconds():
    """Each call alone would end within the limit."""
    environment, question = environment_of(SlowReplies()), Question("q", "d", "3: a", ("a",))
    game = play_within(Limits(seconds=0.3), EchoAgent(), environment, question, seed="0", temperature=0.0)
    with pytest.raises(LimitReached, match=r"no answer within the limit of 0.3 s"):
        asyncio.run(game)
