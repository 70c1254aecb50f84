"""One game of a pair: how it samples, and what it pays."""

import asyncio

from prompt_r1.environments.environment import Environment, environment_of
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import OwnSource
from prompt_r1.rollout import play_question
from prompt_r1.types import Question
from tests.support.echo_agent import EchoAgent, Shouting


def test_a_game_samples_with_its_temperature_and_top_p():
    heard = set()

    class Listening(EchoAgent):
        async def generate(self, tokens, *, temperature, top_p=1.0, **how):
            heard.add((temperature, top_p))
            return await super().generate(tokens, temperature=temperature, **how)

    asked = Question("q", "d", "Who?", ("a",))
    asyncio.run(
        play_question(Listening(), environment_of(Shouting()), asked, seed="3", temperature=0.5, top_p=0.9)
    )
    assert heard == {(0.5, 0.9)}


def test_a_game_that_is_played_again_pays_nothing_and_another_sample_or_epoch_asks_anew(tmp_path):
    environment = Environment([OwnSource(Shouting(), seed=0)], journal=Journal(tmp_path))

    def calls_paid(**game: int) -> float:
        asked = Question("q", "d", "2: a", ("a",))
        asyncio.run(play_question(EchoAgent(), environment, asked, seed="0", **game))
        return environment.take_metrics()["env/paid"]

    assert [calls_paid(), calls_paid(), calls_paid(sample=1), calls_paid(epoch=1)] == [2, 0, 2, 2]
