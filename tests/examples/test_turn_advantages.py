"""The advantages of examples/turn_advantages.py, and the answer of the exercise about them."""

import re
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

import pytest

from examples.turn_advantages import LAMBDA, by_turn
from prompt_r1.types import Question, ScoredGame
from tests.support.paths import ROOT
from tests.support.played import play_script
from tests.support.tiny import think

QUESTION = Question("q", "d", "Who?", answers=("Anna",))
ASK = think("hm", prompt="Who?")
ASK_WITHOUT_THOUGHT = "<interaction_prompt>Who?</interaction_prompt>"
ANSWER = think("so", answer="Bob")


def game_of(advantage: float, *turns: str, replies: Sequence[str] = ("Anna.",) * 3) -> ScoredGame:
    return ScoredGame(play_script(QUESTION, turns, list(replies)), None, advantage)


def test_a_turn_is_compared_with_the_same_turn_of_the_games_that_ask_in_it():
    """By hand: three games ask in turn 1 (one badly), two in turn 2 (both well), one in turn 3."""
    games = [
        game_of(1.0, ASK, ASK, ASK, ANSWER),
        game_of(0.5, ASK, ASK, ANSWER),
        game_of(-2.0, ASK_WITHOUT_THOUGHT, ANSWER),
        game_of(0.5, ANSWER),
    ]
    good, bad = LAMBDA / 3 / (stdev([1, 1, 0]) + 1e-6), -LAMBDA * 2 / 3 / (stdev([1, 1, 0]) + 1e-6)
    expected = [[1.0 + good, 1.0, 1.0, 1.0], [0.5 + good, 0.5, 0.5], [-2.0 + bad, -2.0], [0.5]]
    assert by_turn(games) == [pytest.approx(turns) for turns in expected]


def test_the_answer_of_the_exercise_pays_the_reply_that_contains_the_gold_answer():
    page = (ROOT / "examples/exercises.md").read_text("utf-8")
    [source] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    own: dict[str, Callable[..., Any]] = {}
    exec(source, own)
    replies = ["Bob.", "Anna.", "I do not know."]
    advantages = [1.15, -0.58, -0.58]
    games = [
        game_of(advantage, ASK, ANSWER, replies=[reply])
        for advantage, reply in zip(advantages, replies, strict=True)
    ]
    helped = [0.0, 1.0, 0.0]
    for turns, advantage, value in zip(own["by_reply"](games), advantages, helped, strict=True):
        credit = (value - mean(helped)) / (stdev(helped) + 1e-6)
        assert turns == pytest.approx([advantage + LAMBDA * credit, advantage])
