"""What a player hands to its game, its engine and its environment, and what a user's names mean."""

import asyncio

import pytest
import torch

from prompt_r1.agent.agent import Agent, check_question_lengths, compute_dtype
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.data.named import find_questions
from prompt_r1.errors import UsageError
from prompt_r1.miniworld import mini_world
from prompt_r1.protocol import ACTION_ENDS, INSTRUCTIONS, LAST_TURN, Codec
from prompt_r1.types import Completion, Question
from tests import tiny
from tests.tiny import ScriptedAgent, ScriptedEnvironment, think

QUESTION = Question("q7", "test", "Who made it?", ("Anna",))
CODEC = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])


class ScriptedEngine(ScriptedAgent):
    """Stands where an agent behind an endpoint does."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(texts)
        self.ways: list[tuple[float, tuple[str, ...]]] = []  # temperature and stop strings of each call

    async def generate(self, tokens, *, max_new, seed, temperature, stop) -> Completion:
        self.ways.append((temperature, stop))
        return await super().generate(tokens, max_new=max_new, seed=seed)


class NotedEnvironment(ScriptedEnvironment):
    """Records for which game it is asked."""

    async def ask(self, messages, *, sample=0, session="") -> str:
        self.game = (session, sample)
        return await super().ask(messages)


@pytest.mark.parametrize("bounded", [True, False])
def test_a_game_has_the_settings_of_its_run(bounded):
    settings = {"max_turns": 2, "max_tokens": 900, "max_new": 64, "max_reply_tokens": 3 * bounded,
                "force_answer": bounded, "stop_tags": bounded}  # fmt: skip
    config = TrainConfig(**{**PRESETS["mini"], **settings})
    engine = ScriptedEngine([think("1", prompt="a"), think("2", prompt="b")])
    environment = NotedEnvironment(["0123456"])
    play = Agent(engine, CODEC).play
    game = asyncio.run(play(QUESTION, "7/q7/3", 3, environment=environment, config=config, temperature=0.25))
    assert engine.ways == [(0.25, ACTION_ENDS if bounded else ())] * 2
    assert engine.limits == [64, 64] and engine.seeds == ["7/q7/3/1", "7/q7/3/2"]
    assert environment.game == ("q7", 3)
    read = tiny.tokenizer().decode(engine.read[1])
    assert ("012 [cut]" in read, LAST_TURN in read) == (bounded, bounded)
    assert ("0123456" in read) is not bounded and len(game.turns) == 2


def test_a_question_must_leave_room_for_one_token():
    length = len(CODEC.opening(QUESTION.text))
    check_question_lengths([QUESTION], CODEC, length + 1)
    with pytest.raises(UsageError, match=f"question 'q7' takes {length} tokens of a game of {length}"):
        check_question_lengths([QUESTION], CODEC, length)


def test_a_split_in_the_name_of_the_mini_world_goes_before_the_programs_own():
    assert find_questions(["mini:ood"], "validation", 0) == mini_world(0, train=0).ood


@pytest.mark.parametrize(
    ("device", "dtype", "compute"),
    [
        ("cpu", "bfloat16", torch.float32),
        ("cuda", "bfloat16", torch.bfloat16),
        ("cuda", "float32", torch.float32),
    ],
)
def test_matrix_products_have_the_dtype_of_the_run_except_on_a_cpu(device, dtype, compute):
    config = TrainConfig(**{**PRESETS["mini"], "dtype": dtype})
    assert compute_dtype(config, torch.device(device)) is compute
